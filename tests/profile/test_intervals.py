"""Sets of moments, compared with sets of numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from symm_overlap.profile.intervals import Interval, common, total, union, without


def moments(intervals: Iterable[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


def some(source: random.Random) -> list[Interval]:
    starts = [source.randrange(30) for _ in range(source.randrange(7))]
    return [(float(start), float(start + source.randrange(9))) for start in starts]


@pytest.mark.parametrize("seed", range(40))
def test_the_operations_are_those_of_sets(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(50):
        one, other = some(source), some(source)
        first, second = union(one), union(other)
        assert moments(first) == moments(one)
        assert total(first) == len(moments(one))
        for found, expected in (
            (common(first, second), moments(one) & moments(other)),
            (without(first, second), moments(one) - moments(other)),
        ):
            assert moments(found) == expected
            assert total(found) == len(expected), "intervals overlap"
            assert found == sorted(found)
