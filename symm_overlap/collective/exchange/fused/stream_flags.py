"""Flags on a GPU, which the streams of a call raise and wait for.

Streams do so by memory operations, which occupy no multiprocessor, or by small kernels (csrc/cuda/flags.h). Kernels are
needed in a captured graph, since the host does not see its replays and so does not know their epochs.

A kernel cannot raise an error. When a kernel's wait passes its limit, the kernel changes the status, and goes on with
whatever data is there. The last launch of the call on the lane (`symm_overlap.runtime.cuda.signals.CudaSignals.end`)
then fills the outputs with NaN, and copies the status to pinned host memory, together with a number that names the
call, since a graph may have replayed it. There the host finds it, in the next call on the lane or through `failure`.
That launch also begins the next epoch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from .... import _C
from ....kernels.flags import EPOCH, TIMED_OUT, Caller, Expired, Flags
from ....runtime import backend_of, lasting, let_go

_RECORD_WORDS = EPOCH + 2  # the last one names the call; see csrc/cuda/kernels.h


class StreamFlags(Flags):
    """See `symm_overlap.kernels.flags.Flags`.

    The epoch is counted on the GPU, so a CUDA graph continues the count in every replay. Between calls, it is that of
    the next call. When more flags are needed, the old flags are kept, since graphs may have been captured with them.
    The old flags are down in every later call.

    Args:
        in_memory: whether streams use memory operations. Otherwise they launch kernels.
    """

    _counted_ahead = 1

    def __init__(self, device: torch.device, in_memory: bool) -> None:
        self._device, self._in_memory = device, in_memory
        self._before: list[Tensor] = []
        self._callers: dict[Caller, int] = {}
        self._record = torch.zeros(_RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        self._recorded = ctypes.c_int32.from_address(self._record.data_ptr())  # its first word, which is quick to read
        super().__init__(device)

    def __del__(self) -> None:
        # Calls use the flags on other streams than the one that they were allocated on.
        let_go(vars(self), self._device)

    def prepare(self, count: int) -> None:
        """See `Flags.prepare`. It synchronises, because the first call may be on another stream."""
        super().prepare(count)
        torch.cuda.current_stream(self.status.device).synchronize()

    def begin(self, count: int, seconds: float, caller: Caller) -> None:
        """See `Flags.begin`."""
        self.grow(count)
        self.native.begin(self._callers.setdefault(caller, len(self._callers)))
        self.seconds = seconds

    def failure(self) -> Expired | None:
        """See `Flags.failure`."""
        if self._recorded.value == 0:
            return None
        status, chunk, expected, found, *_, call = self._record.tolist()
        return Expired(chunk, expected, found, list(self._callers)[call]) if status == TIMED_OUT else None

    def _new(self, make: Callable[[], Tensor]) -> Tensor:
        return lasting(make, self._device)

    def _new_native(self) -> _C.CudaFlags:
        return _C.CudaFlags(self.status, self._record, self._in_memory)

    def grow(self, count: int) -> None:
        """See `Flags.grow`."""
        if count > self.count:
            self._before += self.words, self.counters
            super().grow(count)
            self.native.use(self.words)

    def up(self, chunk: int) -> None:
        """See `Flags.up`."""
        self.native.up(chunk)

    def wait(self, chunk: int, seconds: float) -> bool:
        """See `Flags.wait`. There is no deadline: a kernel that computes chunks does not wait, so it always ends."""
        self.native.wait(chunk)
        return True

    def abandon(self, error: BaseException) -> None:
        """See `Flags.abandon`. On a separate stream, because the call's streams may wait for flags that never come.

        If CUDA does nothing any more, this does nothing either: ``error`` says more than another error of CUDA.
        """
        with suppress(RuntimeError), torch.cuda.stream(backend_of(self._device.type).stream_ahead(self._device)):
            self.native.give_up()
