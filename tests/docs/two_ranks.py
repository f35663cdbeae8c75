"""A program of a page, on two ranks, as torchrun would start it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def printed_on_two_ranks(text: str, folder: Path) -> list[str]:
    """What each rank prints. The ranks are killed after two minutes."""
    program = folder / "example.py"
    program.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
