"""Flags on a GPU: raised and waited for by small kernels on the streams of a call. Not run yet: no GPU was at hand.

A kernel cannot raise an error. One whose wait has passed its limit changes the status, and goes on with whatever is
there; the last kernel of the call then fills the outputs with NaN, and a copy of the status in pinned host memory tells
the next call on the lane, and whoever asks. The status says which call it was, as it may be one that a graph replays.
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
"""Nanoseconds. A stream waits for a kernel of this rank, which always ends."""

_BLOCK = 4096
_STATUS_WORDS: int = CALL.value + 1


@triton.jit(do_not_specialize=["call"])
def begin_kernel(status, call):  # type: ignore[no-untyped-def]
    """Begin a call: the next epoch."""
    tl.store(status + EPOCH, tl.load(status + EPOCH) + 1)
    tl.store(status + CALL, call, mask=tl.load(status) == 0)


@triton.jit(do_not_specialize=["chunk"])
def raise_kernel(flags, status, chunk):  # type: ignore[no-untyped-def]
    """Raise a flag: what the stream did before can be seen by whoever sees the flag."""
    tl.atomic_xchg(flags + chunk * LINE, tl.load(status + EPOCH), sem="release", scope="sys")


@triton.jit(do_not_specialize=["chunk", "limit"])
def poll_kernel(flags, status, chunk, limit):  # type: ignore[no-untyped-def]
    """Hold up the stream until a flag is up."""
    wait_for_flag(flags, status, chunk, tl.load(status + EPOCH), limit, True, False)


@triton.jit(do_not_specialize=["count"])
def poison_kernel(status, output, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill ``count`` bytes with 0xFF, a NaN of every float, if the status is not 0."""
    if tl.load(status) != 0:
        for at in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            where = at + tl.arange(0, BLOCK)
            tl.store(output + where, tl.full((BLOCK,), 255, tl.uint8), mask=where < count)


class StreamFlags(Flags):
    """See `symm_overlap.kernels.flags.Flags`.

    The epoch is counted on the GPU, in front of each call: a CUDA graph counts on in every replay. When there have to
    be more flags, the former ones are kept, since graphs may have been captured with them; they are down in every later
    call.
    """

    def __init__(self, device: torch.device) -> None:
        self._before: list[Tensor] = []
        self._callers: dict[Caller, int] = {}
        super().__init__(device)
        self._told = torch.zeros(_STATUS_WORDS, dtype=torch.int32, pin_memory=True)
        self._ahead = torch.cuda.Stream(device, priority=-1)  # nothing ever waits on it

    def prepare(self, count: int) -> None:
        """See `Flags.prepare`. The first call may be on another stream than this."""
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
        status, chunk, expected, found, *_, call = self._told.tolist()
        return Expired(chunk, expected, found, list(self._callers)[call]) if status == TIMED_OUT else None

    def _grow(self, count: int) -> None:
        if count > self.count:
            self._before += self.words, self.counters
        super()._grow(count)

    def up(self, chunk: int) -> None:
        """See `Flags.up`."""
        raise_kernel[(1,)](self.words, self.status, chunk, num_warps=1)

    def wait(self, chunk: int, seconds: float) -> bool:
        """See `Flags.wait`. It has no deadline: a kernel that makes chunks waits for nobody."""
        poll_kernel[(1,)](self.words, self.status, chunk, _FOR_EVER, num_warps=1)
        return True

    def finish(self, outputs: Sequence[Tensor]) -> Expired | None:
        """See `Flags.finish`. The host learns of a failure by the next call."""
        for flat in _bytes_of(outputs):
            poison_kernel[(min(64, -(-flat.numel() // _BLOCK)),)](self.status, flat, flat.numel(), BLOCK=_BLOCK)
        self._told.copy_(self.status[:_STATUS_WORDS], non_blocking=True)
        return None

    def abandon(self, error: BaseException) -> None:
        """See `Flags.abandon`. Not behind the call's own streams, which may wait for what does not come."""
        with torch.cuda.stream(self._ahead):
            self.status[0] = ABANDONED


def _bytes_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of each tensor that has any; their elements lie together, in any order."""
    for output in outputs:
        if output.numel():
            yield output.as_strided((output.numel(),), (1,)).view(torch.uint8)
