"""Ranks as processes: started here through torch's launcher, or joined where torchrun has started them.

Everything started here ends together: a rank that fails takes the others along, Ctrl-C ends all of them at once, and
the kernel kills the ranks should the launcher itself be killed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, as torch does, it would keep the group, as a default argument
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from symm_overlap.cli.config import Surroundings

SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch for several ranks on one GPU

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class RankError(RuntimeError):
    """A rank ended with an exception or a signal; the message names the rank and carries its traceback."""


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup


def surroundings() -> Surroundings:
    """What this process sees of the host's GPUs and of a launcher that started it."""
    started = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    started_here = int(os.environ.get("LOCAL_WORLD_SIZE", started)) if started is not None else None
    return Surroundings(torch.cuda.device_count(), os.environ.get(SHARE_GPUS) == "1", started, started_here)


def is_first() -> bool:
    """Whether this process speaks for all: it is rank 0, or there are no ranks yet."""
    return os.environ.get("RANK", "0") == "0"


def run_ranks(fn: Callable[..., Any], args: tuple[Any, ...], world: int) -> Any:
    """Runs ``fn(*args)`` in ``world`` new processes on this host and returns rank 0's result.

    ``fn`` must be importable, ``args`` and the result picklable. ``RANK``, ``WORLD_SIZE`` and the rest of torchrun's
    environment are set in each process; they meet over the loopback interface. Raises :class:`RankError` when a rank
    fails, KeyboardInterrupt on Ctrl-C, SystemExit on another signal; no process outlives the call.
    """
    # All ranks are on this host, whose own name may not resolve; gloo would ask for it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A failing rank is reported once, below, not by each layer of the launcher as well.
    for name in ("elastic.agent.server.api", "elastic.multiprocessing.api"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    # The launcher sets handlers of its own, where it can, and leaves them.
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in HANDLED} if in_main else {}
    with tempfile.TemporaryDirectory(prefix="symm_overlap_") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=",".join(number.name for number in HANDLED),
        )
        ended: BaseException
        try:
            return elastic_launch(config, _rank_main)(fn, args)[0]
        except ChildFailedError as error:
            ended = RankError(_describe(error))
        except SignalException as error:
            ended = KeyboardInterrupt() if error.sigval == signal.SIGINT else SystemExit(128 + error.sigval)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    # Raised with no context: the launcher's frames would keep its queues alive, and so their semaphores in /dev/shm.
    raise ended


def _rank_main(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # Ctrl-C reaches every process of the terminal. A rank just ends, even inside a wait; the launcher says so once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return fn(*args)


def _describe(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    report: Any = failure.message  # a dict where the rank raised, else a line of the launcher's
    if isinstance(report, dict):
        how = f"failed:\n{report['extraInfo']['py_callstack'].rstrip()}"
    elif failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    else:
        how = f"ended with exit code {failure.exitcode}"
    return f"rank {rank} (process {failure.pid}) {how}\nThe other ranks were ended."


@contextmanager
def join(device: str) -> Iterator[Rank]:
    """Joins the process group that the environment describes, for the length of the body.

    ``device`` is ``"cpu"`` or ``"cuda"``. On CPU each rank computes on its share of the host's cores, unless
    ``OMP_NUM_THREADS`` says otherwise.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    place = torch.device("cpu")
    backend = "gloo"
    if device == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        # NCCL refuses two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if local_world <= torch.cuda.device_count() else "gloo"
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    dist.init_process_group(backend)
    try:
        group = dist.group.WORLD
        assert group is not None  # init_process_group has just made it
        yield Rank(dist.get_rank(), dist.get_world_size(), place, group)
    finally:
        # No reference may be left: a thread of gloo's that lets go of a tensor while the interpreter ends, aborts it.
        dist.destroy_process_group()
        gc.collect()
