"""oneDNN caches the code that it generates for each shape. For our calls, this cache stays bounded for any shapes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from symm_overlap import _C
from tests.ranks import Pool, Rank

MIB = 1 << 20
LIMIT_SHAPES = 48


def resident() -> int:
    """Return the bytes of this process that are in memory (its resident set size)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def multiply(rows: int, inner: int = 128) -> tuple[torch.Tensor, bool]:
    """Return a product of this shape, and whether oneDNN computed it."""
    a, b = torch.full((rows, inner), 0.5), torch.full((inner, 96), 0.25)
    out = torch.empty(rows, 96)
    with torch.profiler.profile() as profile:
        _C.multiply(a, b, out, False)
    assert out.eq(inner / 8).all()
    return out, any(event.name == "symm_overlap::onednn_matmul" for event in profile.events())


def growth_over_shapes(me: Rank, shapes: int) -> tuple[bool, int]:
    _C.prefer_onednn(True)
    if not _C.onednn_is_quicker():
        return False, 0
    largest = torch.full((200 + shapes, 128), 0.5)
    b, out = torch.full((128, 96), 0.25), torch.empty(200 + shapes, 96)
    _C.multiply(largest, b, out, False)
    before = resident()
    for rows in range(200, 200 + shapes):
        _C.multiply(largest[:rows], b, out[:rows], False)
    return True, resident() - before


def shapes_that_repeat(me: Rank) -> list[bool]:
    _C.prefer_onednn(True)
    if not _C.onednn_is_quicker():
        return []
    rows = range(200, 200 + LIMIT_SHAPES + 2)
    first = [multiply(each)[1] for each in rows]
    assert [multiply(each)[1] for each in rows] == first, "a shape keeps its library, so its results keep their bits"
    _C.prefer_onednn(True)
    assert multiply(rows[-1])[1], "prefer_onednn starts the count of shapes again"
    return first


def test_500_shapes_cost_less_than_64_mib(fresh_ranks: Callable[..., Pool]) -> None:
    works, grown = fresh_ranks(1).run(1, growth_over_shapes, 500)[0]
    if not works:
        pytest.skip("torch has no oneDNN that works here")
    assert grown < 64 * MIB


def test_shapes_that_repeat_keep_their_library_and_the_first_ones_have_onednn(
    fresh_ranks: Callable[..., Pool],
) -> None:
    """The first shapes are multiplied by oneDNN, up to a limit. Each shape keeps its library."""
    (first,) = fresh_ranks(1).run(1, shapes_that_repeat)
    if not first:
        pytest.skip("torch has no oneDNN that works here")
    assert first == [True] * LIMIT_SHAPES + [False] * 2
