"""A lane on a GPU that does not exist, for tests of what the host decides and what it would launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symm_overlap import _C
from symm_overlap.runtime import Lane, freeing
from symm_overlap.runtime.cuda.signals import CudaSignals
from symm_overlap.runtime.cuda.workspace import CudaWorkspace, MappedMemory

DEVICE = torch.device("cuda", 3)  # the current device is another one

if not _C.with_cuda:
    _C.capturing = lambda device: False
    freeing._may_free = lambda device: True  # workspaces call it when they go away, after a test too


class Memory:
    """Something that a test can have a weak reference to."""


class FakeSignals:
    """Records the name and the arguments of every method call. It goes away as `CudaSignals` does.

    ``memory`` stands for what it holds.
    """

    __del__ = CudaSignals.__del__

    def __init__(self) -> None:
        self._lane, self._device, self.memory = None, DEVICE, Memory()
        self.asked: list[tuple[object, ...]] = []
        self.first_of_a_graph = False

    def begin(self, *arguments: object) -> bool:
        self.asked.append(("begin", *arguments))
        return _C.capturing(DEVICE.index)  # type: ignore[no-any-return]

    def end(self, outputs: Sequence[torch.Tensor], flags: object) -> bool:
        self.asked.append(("end", outputs))
        return not _C.capturing(DEVICE.index)

    def barrier_around_replays(self) -> bool:
        self.asked.append(("barrier_around_replays",))
        return self.first_of_a_graph

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.asked.append((name, *arguments))


class Gpu:
    """Replaces parts of CUDA during a test. ``capturing``: whether the lane's device is capturing a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.current = 0
        monkeypatch.setattr(torch.cuda, "device", partial(Scope, self))
        monkeypatch.setattr(_C, "capturing", self.is_capturing, raising=False)
        monkeypatch.setattr(freeing, "_may_free", lambda device: not self.capturing)

    def is_capturing(self, device: int) -> bool:
        return self.capturing and device == DEVICE.index


class Scope:
    """Replaces torch.cuda.device."""

    def __init__(self, gpu: Gpu, device: torch.device) -> None:
        self._gpu, self._index = gpu, device.index

    def __enter__(self) -> None:
        self._before, self._gpu.current = self._gpu.current, self._index

    def __exit__(self, *error: object) -> None:
        self._gpu.current = self._before


def cuda_lane() -> Lane:
    """Return a lane of rank 1 of 4 whose workspace has room for calls of up to 1 MiB. torch does not know its group."""
    group = SimpleNamespace(group_name="tp", rank=lambda: 1, size=lambda: 4)
    lane = Lane(group, DEVICE, 2, os.getpid())  # type: ignore[arg-type]
    workspace = workspace_of(lane)
    workspace.half, workspace.channels = 1 << 20, 4
    workspace._memory = MappedMemory("tensor", "handle", DEVICE)  # type: ignore[arg-type]
    workspace._signals = FakeSignals()  # type: ignore[assignment]
    return lane


def workspace_of(lane: Lane) -> CudaWorkspace:
    assert isinstance(lane.workspace, CudaWorkspace)
    return lane.workspace


def asked_of(lane: Lane) -> list[tuple[object, ...]]:
    """Return the method calls that the lane's signals have recorded."""
    return workspace_of(lane)._signals.asked  # type: ignore[union-attr]


def call(lane: Lane, body: Callable[[int], object] = lambda half: None, nbytes: int = 64) -> None:
    """Make one call on a lane."""
    lane.run("all_gather", body, [], nbytes=nbytes, channels=1, seconds=1.0, call_hash=7)
