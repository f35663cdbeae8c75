"""The hash by which the ranks of a lane see whether they are in the same call."""

from __future__ import annotations

_ODD = 0x9E3779B97F4A7C15  # spreads the number of the call over all bits of the hash
_64_BITS = (1 << 64) - 1


def call_hash(digest: int, number: int) -> int:
    """Return a 64-bit hash of a call. It is never 0, for which ranks would compare nothing (`Workspace.begin`).

    Args:
        digest: what must be the same on every rank, in 64 bits.
        number: how many calls this rank has counted.
    """
    return (digest + number * _ODD) & _64_BITS or 1
