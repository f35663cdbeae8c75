"""The program in docs/nn.md runs on two ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks


@pytest.mark.slow
def test_the_program_of_the_page(tmp_path: Path) -> None:
    (text,) = (block.text for block in blocks(ROOT / "docs/nn.md") if block.language == "python")
    program = tmp_path / "example.py"
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
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output in printed:
        assert output.splitlines()[-1:] == ["torch.Size([2, 64, 64]) torch.Size([256, 64])"], output
