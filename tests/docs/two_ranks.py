"""Run a program of a page on two ranks, in the same environment as under torchrun.

The ranks are forked from the server of tests/ranks.py, which has imported torch, so that no rank spends seconds on it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from symm_overlap.cli.fork_server import end_with_parent
from tests.docs.pages import ROOT
from tests.ranks import forks

SECONDS = 120.0


def printed_on_two_ranks(text: str, folder: Path, seconds: float = SECONDS) -> list[str]:
    """Run the program. Return the output of each rank.

    Raises:
        AssertionError: a rank failed or exceeded the deadline. The message has all output and every rank's stacks.
    """
    program = folder / "example.py"
    program.write_text(text)
    # As under torchrun, the ranks are clients of a store that exists before them, so no rank has to find a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    files = [folder / f"rank{rank}.txt" for rank in range(2)]
    for file in files:
        file.touch()  # a rank may be stopped before it has opened its file
    ranks: list[BaseProcess] = []
    try:
        for rank, file in enumerate(files):
            ranks.append(forks().Process(target=_run, args=(program, file, environment | {"RANK": str(rank)})))
            ranks[-1].start()
        deadline = time.monotonic() + seconds
        while (codes := [rank.exitcode for rank in ranks]) != [0, 0]:
            if any(codes) or time.monotonic() > deadline:
                _stop_with_stacks(ranks)
                raise AssertionError(f"exit codes {codes} (None: killed)\n" + "\n".join(map(Path.read_text, files)))
            time.sleep(0.05)
        return [file.read_text() for file in files]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _run(program: Path, file: Path, environment: Mapping[str, str]) -> None:
    """Run the program as its own main module, with all its output redirected to a file."""
    end_with_parent()
    with file.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # OpenMP was loaded before the variable was set
    sys.path[:0] = [str(program.parent), str(ROOT)]
    sys.argv = [str(program)]
    runpy.run_path(str(program), run_name="__main__")


def _stop_with_stacks(ranks: list[BaseProcess]) -> None:
    """End the ranks that are still running. Python's fault handler then writes their stacks."""
    for rank in ranks:
        if rank.exitcode is None and rank.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended just now
                os.kill(rank.pid, signal.SIGABRT)
    for rank in ranks:
        rank.join(20)
