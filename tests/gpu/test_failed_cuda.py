"""A process whose CUDA has failed shows the error, and ends as after any other error."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.gpu.conftest import ENVIRONMENT, WAITS

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys
import torch, torch.distributed as dist
import symm_overlap

store, rank, path, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
A, B = torch.ones(64, 32, device="cuda"), torch.ones(32, 16, device="cuda")
with symm_overlap.force_path(path):
    symm_overlap.all_gather_matmul(A, [B], 0, dist.group.WORLD, return_A=False)
torch.cuda.synchronize()
dist.barrier()
torch._assert_async(torch.zeros(1, device="cuda"))
try:
    torch.cuda.synchronize()
finally:
    if ending == "destroys the group":
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("path", "waits", "ending"),
    [
        ("pipelined", "kernels", "leaves the group"),
        ("pipelined", "memory", "destroys the group"),
        ("fused", "memory", "leaves the group"),
    ],
)
def test_a_process_whose_cuda_has_failed_shows_the_error(
    tmp_path: pathlib.Path, path: str, waits: str, ending: str
) -> None:
    """torch waits for the device before it frees symmetric memory. That fails, too, and in a destructor it would end
    the process without a traceback.
    """
    environment = {**os.environ, **ENVIRONMENT["cuda"], **WAITS[waits]}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank), path, ending], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=60)
            assert "in synchronize" in said, said
            assert "Error: CUDA error: " in said, said
            assert rank.returncode == 1, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
