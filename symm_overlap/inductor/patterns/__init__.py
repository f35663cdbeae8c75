"""The patterns: one file for each collective."""

from __future__ import annotations

from .add_first import add_first
from .all_gather import AllGather
from .all_reduce import AllReduce
from .batch_of_one import unbatch
from .bias_first import bias_first
from .bucket import empty_buckets
from .cast_first import cast_first
from .forms import make_plain
from .pattern import Pattern, SkipError
from .quantise_first import quantise_first
from .reduce_scatter import ReduceScatter
from .sums import drop_zeros

__all__ = [
    "PATTERNS",
    "Pattern",
    "SkipError",
    "add_first",
    "bias_first",
    "cast_first",
    "drop_zeros",
    "empty_buckets",
    "make_plain",
    "quantise_first",
    "unbatch",
]

PATTERNS: tuple[type[Pattern], ...] = (ReduceScatter, AllReduce, AllGather)
"""The patterns in the order in which they are tried. A matmul between two collectives belongs to the first match."""
