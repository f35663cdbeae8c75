"""A process ends while its streams, or its graphs, wait for a peer."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.gpu.conftest import ENVIRONMENT, WAITS

pytestmark = pytest.mark.gpu

# Each rank is a separate interpreter that ends in the normal way. The ranks of a pool end by os._exit.
LEAVES_A_WAIT = """
import ctypes, sys, time
import torch, torch.distributed as dist
import symm_overlap

store, rank, ending, seconds, op = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5]
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
A, B = torch.ones(64, 32, device="cuda"), torch.ones(32, 16, device="cuda")

def call():
    if op == "sum":  # in one launch, in which ranks meet
        with symm_overlap.force_path("sequential"):
            return symm_overlap.matmul_all_reduce(A, B, "sum", dist.group.WORLD)
    with symm_overlap.force_path("pipelined", chunks=1, streams=2):
        return symm_overlap.all_gather_matmul(A, [B], 0, dist.group.WORLD, return_A=False)[1][0]

expected = torch.full((64, 16), 64.0) if op == "sum" else torch.full((128, 16), 32.0)
assert torch.equal(call().cpu(), expected)
if op == "replay":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), symm_overlap.timeout(seconds):
        call()
dist.barrier()
if rank == 1:
    time.sleep(600)
if op == "replay":
    graph.replay()
else:
    with symm_overlap.timeout(seconds):
        call()  # whose peer never does
print("ends", flush=True)
if ending == "without Python":
    ctypes.CDLL(None).exit(7)
sys.exit(7)
"""


@contextmanager
def leaving_a_wait(
    folder: pathlib.Path, waits: str, ending: str, seconds: float, op: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a process that is about to end while it waits, and the peer that it waits for."""
    command, how = [sys.executable, "-c", LEAVES_A_WAIT, str(folder / "store")], [ending, str(seconds), op]
    environment = {**os.environ, **ENVIRONMENT["cuda"], **WAITS[waits]}
    processes = [
        subprocess.Popen([*command, str(rank), *how], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert processes[0].stdout is not None
        assert processes[0].stdout.readline() == "ends\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("waits", "ending", "seconds", "op"),
    [
        ("kernels", "with Python", 5.0, "gather"),
        ("memory", "with Python", 5.0, "gather"),
        ("memory", "without Python", 300.0, "gather"),
        ("memory", "with Python", 5.0, "sum"),
        ("memory", "without Python", 300.0, "sum"),
    ],
)
def test_a_process_ends_with_a_wait_that_nobody_answers(
    tmp_path: pathlib.Path, waits: str, ending: str, seconds: float, op: str
) -> None:
    """When Python ends, it frees the lanes, and torch then waits for the device, at most until the deadline. If nothing
    is freed before the exit handlers run, our exit handler ends the waits of streams, long before their deadline.
    """
    with leaving_a_wait(tmp_path, waits, ending, seconds, op) as (leaving, staying):
        assert leaving.wait(timeout=15) == 7
        assert staying.poll() is None, "the peer has ended, but it should still be running"


@pytest.mark.parametrize(("waits", "op"), [*((waits, "replay") for waits in WAITS), ("kernels", "gather")])
def test_a_process_ends_with_a_wait_whose_peer_has_died(tmp_path: pathlib.Path, waits: str, op: str) -> None:
    """Python frees the lane when it ends, and torch then waits for the replay, which the host does not see, or for the
    kernels of a call.
    """
    with leaving_a_wait(tmp_path, waits, "with Python", 300.0, op) as (leaving, staying):
        time.sleep(3.0)  # by now Python has freed the lane
        staying.kill()
        assert leaving.wait(timeout=15) == 7
