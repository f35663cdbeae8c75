"""A program of a page, on two ranks, as torchrun would start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.docs.pages import ROOT

SECONDS = 120.0


def printed_on_two_ranks(text: str, folder: Path, seconds: float = SECONDS) -> list[str]:
    """What each rank prints.

    Raises:
        AssertionError: a rank failed, or ran past the deadline: with all that was printed, and every rank's stacks.
    """
    program = folder / "example.py"
    program.write_text(text)
    # As under torchrun, the ranks are clients of a store that is there before them: no rank has to find a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [folder / f"rank{rank}.txt" for rank in range(2)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, file in enumerate(files):
            with file.open("wb") as output:
                command = [sys.executable, "-X", "faulthandler", str(program)]
                own = {**environment, "RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + seconds
        while (codes := [rank.poll() for rank in ranks]) != [0, 0]:
            if any(codes) or time.monotonic() > deadline:
                _stop_with_stacks(ranks)
                raise AssertionError(f"exit codes {codes} (None: killed)\n" + "\n".join(map(Path.read_text, files)))
            time.sleep(0.05)
        return [file.read_text() for file in files]
    finally:
        for rank in ranks:
            rank.kill()


def _stop_with_stacks(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End those that still run; Python's fault handler then writes their stacks."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGABRT)
    for rank in ranks:
        rank.wait(20)
