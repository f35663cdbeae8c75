"""An interpreter that ends while a daemon thread is in C++ ends quietly, with the exit code that it would have had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import symm_overlap
from symm_overlap import _C

rank, file, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
group = dist.group.WORLD
symm_overlap.prepare(group, 1 << 10)
tensor = symm_mem.empty(1, device="cpu")
handle = symm_mem.rendezvous(tensor, group)
a = torch.ones(700, 700)
out = torch.empty_like(a)

def multiply():
    while True:
        _C.multiply(a, a, out, False)

works = {
    "wait_signal": lambda: handle.wait_signal(1, 0),
    "barrier": lambda: handle.barrier(),
    "op": lambda: symm_overlap.all_gather(torch.ones(1), 0, group),
    "exchange": lambda: _C.exchange(group.group_name, "test", ""),
    "multiply": multiply,
}

class Slow:
    # Deleted when the modules are, so the other thread wants the GIL while the interpreter ends.
    def __del__(self, sleep=time.sleep):
        sleep(0.6)

if rank == 1:
    sys.stdin.read()  # until the test has seen the other one end
else:
    threading.Thread(target=works[what], daemon=True).start()
    time.sleep(0.4)
    slow = Slow()
    sys.exit(7)
"""


@pytest.mark.parametrize("what", ["wait_signal", "barrier", "op", "exchange", "multiply"])
def test_a_daemon_thread_in_cpp_does_not_disturb_the_end_of_the_interpreter(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    arguments = [str(tmp_path / "store"), what]
    with subprocess.Popen([*command, "1", *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as peer:
        try:
            done = subprocess.run([*command, "0", *arguments], capture_output=True, text=True, timeout=60)
        finally:
            peer.kill()
    assert done.returncode == 7, done.stderr
    assert "terminate" not in done.stderr
    assert "Fatal Python error" not in done.stderr
