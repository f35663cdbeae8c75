"""Flags on a GPU, raised and awaited by small kernels on the streams of a call. Not run yet: no GPU was available.

A kernel cannot raise an error. When a kernel's wait passes its limit, the kernel changes the status, and goes on with
whatever data is there. The last kernel of the call then fills the outputs with NaN. The host reads a copy of the status
in pinned host memory, in the next call on the lane or through `failure`. The status names the failed call, since a
graph may have replayed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import CALL, EPOCH, INTERPRETED, LINE, wait_for_flag
from .flags import ABANDONED, TIMED_OUT, Caller, Expired, Flags

__all__ = ["INTERPRETED", "StreamFlags", "begin_kernel", "poison_kernel", "poll_kernel", "raise_kernel"]

_FOR_EVER = 2**62
"""Nanoseconds. A stream has no deadline here: it waits for a kernel of this rank, which always ends."""

_BLOCK = 4096
_STATUS_WORDS: int = CALL.value + 1


@triton.jit(do_not_specialize=["call"])
def begin_kernel(status, call):  # type: ignore[no-untyped-def]
    """Begin a call: go on to the next epoch, and store the number of the call unless an earlier one failed."""
    tl.store(status + EPOCH, tl.load(status + EPOCH) + 1)
    tl.store(status + CALL, call, mask=tl.load(status) == 0)


@triton.jit(do_not_specialize=["chunk"])
def raise_kernel(flags, status, chunk):  # type: ignore[no-untyped-def]
    """Raise a flag. A reader that sees the flag also sees everything the stream did before."""
    tl.atomic_xchg(flags + chunk * LINE, tl.load(status + EPOCH), sem="release", scope="sys")


@triton.jit(do_not_specialize=["chunk", "limit"])
def poll_kernel(flags, status, chunk, limit):  # type: ignore[no-untyped-def]
    """Block the stream until a flag is up."""
    wait_for_flag(flags, status, chunk, tl.load(status + EPOCH), limit, True, False)


@triton.jit(do_not_specialize=["count"])
def poison_kernel(status, output, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill ``count`` bytes with 0xFF, a NaN in every floating-point dtype, if the status is not 0."""
    if tl.load(status) != 0:
        for at in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            where = at + tl.arange(0, BLOCK)
            tl.store(output + where, tl.full((BLOCK,), 255, tl.uint8), mask=where < count)


class StreamFlags(Flags):
    """See `symm_overlap.kernels.flags.Flags`.

    The epoch is counted on the GPU at the beginning of each call, so a CUDA graph continues the count in every replay.
    When more flags are needed, the old flags are kept, since graphs may have been captured with them. The old flags are
    down in every later call.
    """

    def __init__(self, device: torch.device) -> None:
        self._before: list[Tensor] = []
        self._callers: dict[Caller, int] = {}
        super().__init__(device)
        self._status_on_host = torch.zeros(_STATUS_WORDS, dtype=torch.int32, pin_memory=True)
        self._ahead = torch.cuda.Stream(device, priority=-1)  # nothing ever waits on it
        # Loads torch's kernel for `abandon`. Later, CUDA might not load it before the waits have ended by themselves.
        self.status[0] = 0

    def prepare(self, count: int) -> None:
        """See `Flags.prepare`. It synchronises, because the first call may be on another stream."""
        super().prepare(count)
        torch.cuda.current_stream(self.status.device).synchronize()

    def kernels(self, outputs: Sequence[Tensor], ahead: Callable[..., None]) -> None:
        """See `Flags.kernels`."""
        ahead(begin_kernel, self.status, 0, num_warps=1)
        ahead(raise_kernel, self.words, self.status, 0, num_warps=1)
        ahead(poll_kernel, self.words, self.status, 0, _FOR_EVER, num_warps=1)
        for flat in _bytes_of(outputs):
            ahead(poison_kernel, self.status, flat, flat.numel(), BLOCK=_BLOCK)

    def begin(self, count: int, seconds: float, caller: Caller) -> None:
        """See `Flags.begin`."""
        self._grow(count)
        begin_kernel[(1,)](self.status, self._callers.setdefault(caller, len(self._callers)), num_warps=1)
        self.seconds = seconds

    def failure(self) -> Expired | None:
        """See `Flags.failure`."""
        status, chunk, expected, found, *_, call = self._status_on_host.tolist()
        return Expired(chunk, expected, found, list(self._callers)[call]) if status == TIMED_OUT else None

    def _grow(self, count: int) -> None:
        if count > self.count:
            self._before += self.words, self.counters
        super()._grow(count)

    def up(self, chunk: int) -> None:
        """See `Flags.up`."""
        raise_kernel[(1,)](self.words, self.status, chunk, num_warps=1)

    def wait(self, chunk: int, seconds: float) -> bool:
        """See `Flags.wait`. There is no deadline: a kernel that computes chunks does not wait, so it always ends."""
        poll_kernel[(1,)](self.words, self.status, chunk, _FOR_EVER, num_warps=1)
        return True

    def finish(self, outputs: Sequence[Tensor]) -> Expired | None:
        """See `Flags.finish`. The host finds a failure in the next call at the latest."""
        for flat in _bytes_of(outputs):
            poison_kernel[(min(64, -(-flat.numel() // _BLOCK)),)](self.status, flat, flat.numel(), BLOCK=_BLOCK)
        self._status_on_host.copy_(self.status[:_STATUS_WORDS], non_blocking=True)
        return None

    def abandon(self, error: BaseException) -> None:
        """See `Flags.abandon`. On a separate stream, because the call's streams may wait for flags that never come."""
        with torch.cuda.stream(self._ahead):
            self.status[0] = ABANDONED


def _bytes_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of each tensor that is not empty. The elements of each are dense in memory, in any order."""
    for output in outputs:
        if output.numel():
            yield output.as_strided((output.numel(),), (1,)).view(torch.uint8)
