"""If the interpreter ends while a daemon thread is in C++, it ends without an error and with its normal exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

pytestmark = pytest.mark.slow

# Imports once, and forks two ranks for each case. Rank 0 ends as an interpreter normally does, with finalisation.
PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
import torch.fx.experimental.symbolic_shapes  # as the first symmetric tensor does
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import symm_overlap
from symm_overlap import _C

class Slow:
    # Deleted together with the modules, so the other thread waits for the GIL while the interpreter ends.
    def __del__(self, sleep=time.sleep):
        sleep(0.6)

def multiply():
    while True:
        _C.multiply(a, a, out, False)

def fork():
    # Returns the pids of all ranks, by case and rank, in the first process. In a rank, returns its own case and rank.
    pids = {}
    for name in names:
        for rank in range(2):
            if (pid := os.fork()) == 0:
                return {}, name, rank
            pids[name, rank] = pid
    return pids, None, None

folder, names = Path(sys.argv[1]), sys.argv[2:]
pids, name, rank = fork()
if pids:
    codes = {}
    for name in names:
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(pids[name, 0], 0)[1])
        os.kill(pids[name, 1], signal.SIGKILL)  # its peer must not end earlier
        os.waitpid(pids[name, 1], 0)
    print(json.dumps(codes))
    sys.exit(0)

os.dup2(os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"{name}.store"), 2), rank=rank, world_size=2)
group = dist.group.WORLD
symm_overlap.all_gather(torch.ones(1 << 8), 0, group)  # makes the lane
tensor = symm_mem.empty(1, device="cpu")
handle = symm_mem.rendezvous(tensor, group)
a = torch.ones(700, 700)
out = torch.empty_like(a)
works = {
    "wait_signal": lambda: handle.wait_signal(1, 0),
    "barrier": lambda: handle.barrier(),
    "op": lambda: symm_overlap.all_gather(torch.ones(1), 0, group),
    "exchange": lambda: _C.exchange(group.group_name, "test", ""),
    "multiply": multiply,
}
if rank == 1:
    time.sleep(600)
threading.Thread(target=works[name], daemon=True).start()
time.sleep(0.4)
slow = Slow()
sys.exit(7)
"""
WORKS = ["wait_signal", "barrier", "op", "exchange", "multiply"]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return the exit code of rank 0 and what it wrote to stderr, by the work that its daemon thread was doing."""
    folder = tmp_path_factory.mktemp("endings")
    command = [sys.executable, "-c", PROGRAM, str(folder), *WORKS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):  # no process is left, unless one hangs
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors.decode()
    return {what: (code, (folder / f"{what}.0").read_text()) for what, code in json.loads(output).items()}


@pytest.mark.parametrize("what", WORKS)
def test_a_daemon_thread_in_cpp_does_not_disturb_the_end_of_the_interpreter(
    endings: dict[str, tuple[int, str]], what: str
) -> None:
    code, errors = endings[what]
    assert code == 7, errors
    assert "terminate" not in errors
    assert "Fatal Python error" not in errors
