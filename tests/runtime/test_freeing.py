"""Memory on a GPU that goes away is freed once the GPU has been waited for."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch

from symm_overlap.runtime import freeing

GPU = torch.device("cuda", 3)


class Memory:
    """Stands for symmetric memory, which Python frees with its last reference."""


class Gpu:
    """Replaces the wait for a GPU. ``idle``: whether it is possible. ``asked``: for which devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.idle = True
        self.asked: list[int] = []
        monkeypatch.setattr(freeing, "_may_free", self._may_free)
        monkeypatch.setattr(freeing, "_kept", [])

    def _may_free(self, device: int) -> bool:
        self.asked.append(device)
        return self.idle


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def let_go(device: torch.device) -> weakref.ref[Memory]:
    memory = Memory()
    freeing.let_go(memory, device)
    return weakref.ref(memory)


def test_memory_is_freed_once_the_gpu_has_been_waited_for(gpu: Gpu) -> None:
    assert let_go(GPU)() is None
    assert gpu.asked == [3]


def test_memory_on_a_cpu_is_freed_at_once(gpu: Gpu) -> None:
    assert let_go(torch.device("cpu"))() is None
    assert not gpu.asked


def test_memory_is_kept_while_the_gpu_cannot_be_waited_for(gpu: Gpu) -> None:
    gpu.idle = False
    memory = let_go(GPU)
    freeing.free_kept(GPU)
    assert memory() is not None
    gpu.idle = True
    freeing.free_kept(GPU)
    assert memory() is None
    freeing.free_kept(GPU)
    assert gpu.asked == [3, 3, 3]  # nothing is left to wait for


PROGRAM = """
from symm_overlap.runtime import freeing
import torch

class Memory:
    def __del__(self):
        print("freed", flush=True)

freeing._may_free = lambda device: False
freeing.let_go(Memory(), torch.device("cuda", 0))
print("ends", flush=True)
"""


def test_what_is_kept_outlives_the_interpreter() -> None:
    """torch's destructor of symmetric memory would end a process whose CUDA has failed."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "ends\n"
