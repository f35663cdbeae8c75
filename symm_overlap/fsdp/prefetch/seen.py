"""What is observed of a sharded module while a step is recorded: how long its collectives and their copies take."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from .clock import EventClock, HostClock, Stamp

Spans = list[tuple[Stamp, Stamp]]


class Recording(Protocol):
    """The recorder, as the timed collectives see it.

    Attributes:
        recording: whether what happens now belongs to the recorded step.
    """

    clock: HostClock | EventClock
    recording: bool


@dataclass
class Seen:
    """A module that is recorded, and what was observed of it."""

    name: str
    module: nn.Module
    state: Any
    groups: list[Any]
    gather: defaultdict[int, Spans] = field(default_factory=lambda: defaultdict(list))  # by the index of the group
    copy_out: defaultdict[int, Spans] = field(default_factory=lambda: defaultdict(list))
    copy_in: defaultdict[int, Spans] = field(default_factory=lambda: defaultdict(list))
    reduce: defaultdict[int, Spans] = field(default_factory=lambda: defaultdict(list))
    nbytes: dict[int, int] = field(default_factory=dict)
    reduced: int = 0  # how many reduce-scatters have been assigned to a recorded call


class TimedGather:
    """A module's all-gather, with its time recorded."""

    def __init__(self, inner: Any, recorder: Recording, layer: Seen, index: int) -> None:
        self._inner, self._recorder, self._layer, self._index = inner, recorder, layer, index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.recording:
            return self._inner(output_tensor, *args, **kwargs)
        start = self._recorder.clock.now()
        work = self._inner(output_tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        self._layer.gather[self._index].append((start, self._recorder.clock.now()))
        self._layer.nbytes[self._index] = output_tensor.nbytes
        return work


class TimedReduce:
    """A module's reduce-scatter, with its time recorded.

    Torch allocates the input right before the copy into it, so the copy-in is timed from the allocation on.
    """

    def __init__(self, inner: Any, recorder: Recording, layer: Seen, index: int) -> None:
        self._inner, self._recorder, self._layer, self._index = inner, recorder, layer, index
        self._allocated: Stamp = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.recording and self._allocated is None:
            self._allocated = self._recorder.clock.now()
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.recording:
            return self._inner(*args, **kwargs)
        start = self._recorder.clock.now()
        work = self._inner(*args, **kwargs)
        if work is not None:
            work.wait()
        self._layer.reduce[self._index].append((start, self._recorder.clock.now()))
        if self._allocated is not None:
            self._layer.copy_in[self._index].append((self._allocated, start))
        self._allocated = None
        return work
