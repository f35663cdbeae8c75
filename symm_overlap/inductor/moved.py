"""Bytes moved: what one rank sends to carry out a collective, which is also what it receives.

===========================  ===========================================================================
all-gather                   the shard, to W - 1 ranks
reduce-scatter               W - 1 parts of the product: (W - 1) / W of its bytes
all-reduce, in two steps     such a reduce-scatter and an all-gather of the sums: 2 (W - 1) / W of its bytes
all-reduce, in one shot      the whole product, to W - 1 ranks
===========================  ===========================================================================

These are also the bytes of torch.distributed's collectives, where they go in a ring. Where the ranks cannot share an
all-reduce evenly it is the rank with the largest share that is told of. Sizes that are symbolic give None.
"""

from __future__ import annotations

from torch import Tensor

from ..collective.choice import Choice
from ..collective.exchange.bounds import bounds, element_bounds
from .arrangement import Size


def of_parts(part: Tensor, world: int) -> int | None:
    """For an all-gather of shards like ``part``, and for a reduce-scatter that leaves each rank such a part."""
    return known_bytes((world - 1) * part.numel() * part.element_size())


def of_all_reduce(rows: Size, columns: Size, itemsize: int, world: int, choice: Choice | None = None) -> int | None:
    """For an all-reduce of a matrix, in the way that was chosen; if none was, in two steps."""
    whole = rows * columns * itemsize
    if choice is not None and choice.one_shot:
        return known_bytes((world - 1) * whole)
    # Ranks share out elements, or where the product is made in chunks, its rows.
    units = rows if choice is not None and not choice.whole else rows * columns
    if not isinstance(units, int) or units == 0:
        return known_bytes(whole)
    planned = choice is not None and choice.whole and choice.exchange == "planned"
    shares = element_bounds(units, world, itemsize) if planned else bounds(units, world)
    return known_bytes(whole + (world - 2) * shares[1] * (whole // units))


def known_bytes(nbytes: Size) -> int | None:
    """The number, where it is known."""
    return nbytes if isinstance(nbytes, int) else None
