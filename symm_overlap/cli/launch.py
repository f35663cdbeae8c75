"""Start the ranks of a command as processes on this host, and end all of them together.

The ranks are forked from a server that has already imported the modules they run, so that they start fast, however many
there are. If a rank fails, the other ranks are ended too. Ctrl-C ends all ranks at once. If the process that started
the ranks is killed, the kernel ends the ranks.
"""

from __future__ import annotations

import logging
import multiprocessing.resource_tracker
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from symm_overlap.cli import fork_server
from symm_overlap.cli.signals import HANDLED, signals_as_exceptions, signals_blocked
from symm_overlap.demo.training import BROKEN_PIPE_EXIT_CODE


class RankError(RuntimeError):
    """A rank ended with an exception or a signal; the message names the rank and carries its traceback."""


def run_ranks(fn: Callable[..., Any], args: tuple[Any, ...], world: int) -> Any:
    """Run ``fn(*args)`` in ``world`` new processes on this host and return rank 0's result.

    ``fn`` must be importable, and ``args`` and the result must be picklable. Importing the module of ``fn`` must start
    no thread and use no GPU. The ranks write to the outputs of this process and have its environment, plus ``RANK``,
    ``WORLD_SIZE`` and the rest of torchrun's variables. They meet in a store that this process hosts on the loopback
    interface. No rank outlives the call.

    Raises:
        RankError: a rank failed.
        BrokenPipeError: a rank could not write its output, because the reader has closed the pipe.
        KeyboardInterrupt: Ctrl-C was pressed.
        SystemExit: this process received another signal that ends a program.
    """
    # A rank that fails is reported once, below. Torch's launcher must not report it as well.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # When Python starts its resource tracker process, it unblocks SIGINT. So start it before the first
    # `signals_blocked`.
    multiprocessing.resource_tracker.ensure_running()
    with tempfile.TemporaryDirectory(prefix="symm_overlap_") as folder, signals_as_exceptions():
        context: ProcessContext | None = None
        fork_server.start([fn.__module__])
        try:
            with signals_blocked(), fork_server.process_context() as here:
                arguments = (world, store.port, folder, here, fn, args)
                context = start_processes(_rank_main, arguments, world, join=False, start_method="forkserver")
            assert context is not None  # with join=False, start_processes returns a context
            while not context.join():
                pass
            return pickle.loads(Path(folder, "result").read_bytes())
        except ProcessExitedException as error:
            assert context is not None
            _raise_what_ended(context, error, Path(folder))
        finally:
            if context is not None:
                with signals_blocked():
                    for process in context.processes:
                        process.kill()
                        process.join()


def _rank_main(
    rank: int,
    world: int,
    port: int,
    folder: str,
    here: fork_server.ProcessContext,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Ctrl-C reaches every process of the terminal. A rank ends without a message, even inside a wait; the command that
    # started it prints one message for all. SIGINT was blocked until here (see `signals_blocked`), so a pending one
    # takes effect now.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    fork_server.end_with_parent()
    fork_server.adopt_context(here)
    # All ranks are on this host. Without this setting gloo would look up the host's own name, which may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store exists already: rank 0 must not host one
        TORCHELASTIC_RESTART_COUNT="0",
    )
    try:
        result = fn(*args)
    except Exception:
        Path(folder, f"failure{rank}").write_bytes(pickle.dumps((time.monotonic_ns(), traceback.format_exc())))
        sys.exit(1)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))


def _raise_what_ended(context: ProcessContext, error: ProcessExitedException, folder: Path) -> NoReturn:
    """Raise the exception of the command that corresponds to how a rank ended. All ranks have ended already."""
    if any(process.exitcode == BROKEN_PIPE_EXIT_CODE for process in context.processes):
        raise BrokenPipeError("the reader of the ranks' output has closed the pipe") from None
    if error.signal_name == signal.SIGINT.name:  # seen before this process handled the same Ctrl-C itself
        raise KeyboardInterrupt from None
    rank, how = error.error_index, f"ended with exit code {error.exit_code}"
    if error.signal_name is not None:
        how = f"was killed by {error.signal_name}"
    else:
        # The rank that failed first may end after the ranks that failed because of it.
        failures = {int(file.name.removeprefix("failure")): file for file in folder.glob("failure*")}
        reports = sorted((*pickle.loads(file.read_bytes()), rank) for rank, file in failures.items())
        if reports:
            _, text, rank = reports[0]
            how = f"failed:\n{text.rstrip()}"
    pid = context.processes[rank].pid
    raise RankError(f"rank {rank} (process {pid}) {how}\nThe other ranks were ended.") from None
