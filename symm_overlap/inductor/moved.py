"""Bytes moved: the bytes that one rank sends for a collective. It receives as many.

===========================  ===========================================================================
all-gather                   the shard, to W - 1 ranks
reduce-scatter               W - 1 parts of the product: (W - 1) / W of its bytes
all-reduce, in two steps     such a reduce-scatter and an all-gather of the sums: 2 (W - 1) / W of its bytes
all-reduce, in one shot      the whole product, to W - 1 ranks
===========================  ===========================================================================

torch.distributed's collectives move the same number of bytes if they run in a ring. If the ranks cannot share an
all-reduce evenly, the number is for the rank with the largest share. If sizes are symbolic, the result is None.
"""

from __future__ import annotations

from torch import Tensor

from ..collective.choosing.choice import Choice
from ..collective.exchange.bounds import bounds, element_bounds
from .arrangement import Size


def of_parts(part: Tensor, world: int, sent: Tensor | None = None) -> int | None:
    """Return the bytes moved by an all-gather of shards like ``part``, or by a reduce-scatter into such parts.

    Args:
        sent: has the dtype of what is sent, if it is not that of the part.
    """
    return known_bytes((world - 1) * part.numel() * (part if sent is None else sent).element_size())


def of_all_reduce(rows: Size, columns: Size, itemsize: int, world: int, choice: Choice | None = None) -> int | None:
    """Return the bytes moved by an all-reduce of a matrix, as chosen. Without a choice it runs in two steps."""
    whole = rows * columns * itemsize
    if choice is not None and choice.one_shot:
        return known_bytes((world - 1) * whole)
    # Ranks divide the elements among themselves, or the rows if the product is computed in chunks.
    units = rows if choice is not None and not choice.whole else rows * columns
    if not isinstance(units, int) or units == 0:
        return known_bytes(whole)
    planned = choice is not None and choice.whole and choice.exchange == "planned"
    shares = element_bounds(units, world, itemsize) if planned else bounds(units, world)
    return known_bytes(whole + (world - 2) * shares[1] * (whole // units))


def known_bytes(nbytes: Size) -> int | None:
    """Return the number, or None if it is symbolic."""
    return nbytes if isinstance(nbytes, int) else None
