"""How long a wait for a peer may last before it is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import _C

_LONGEST = 1e9  # seconds, 30 years: far from any overflow


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Set the deadline of every wait that the calling thread starts inside the block.

    A wait past its deadline raises `torch.distributed.DistBackendError`, which names the op, group, rank, peer, channel
    and the expected and found epoch. Outside any block the deadline is SYMM_OVERLAP_TIMEOUT seconds, by default 300.

    Args:
        seconds: the deadline of one wait, in seconds; above 0 and up to a billion.

    Raises:
        ValueError: ``seconds`` is not in that range.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    not_while_compiling("timeout")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"timeout({seconds}): a deadline is a number of seconds above 0 and up to {_LONGEST:.0f}")
    before = _C.thread_timeout_ms()
    _C.set_thread_timeout_ms(max(1, round(seconds * 1000)))
    try:
        yield
    finally:
        _C.set_thread_timeout_ms(before)


def not_while_compiling(block: str) -> None:
    """Raise RuntimeError where a block of thread settings would be traced away: the compiled ops run without it."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"symm_overlap.{block} inside a compiled function has no effect: put it around the call")


def timeout_ms() -> int:
    """The deadline in force in the calling thread, in milliseconds."""
    return _C.timeout_ms_or_default(0)
