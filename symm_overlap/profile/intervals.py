"""Sets of moments as lists of intervals: sorted, disjoint, half open."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the moments that are in at least one of the intervals, which may overlap and have any order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total(intervals: Intervals) -> float:
    """Return how long the intervals are together."""
    return sum(end - start for start, end in intervals)


def common(first: Intervals, second: Intervals) -> Intervals:
    """Return the moments that are in both sets."""
    found: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def within(intervals: Intervals, span: Interval) -> Intervals:
    """Return those intervals that have a moment in common with ``span``, without looking at all of them."""
    first = bisect_left(intervals, span[0], key=lambda each: each[1])
    return intervals[first : bisect_left(intervals, span[1], key=lambda each: each[0])]


def without(first: Intervals, second: Intervals) -> Intervals:
    """Return the moments of ``first`` that are not in ``second``."""
    if not first:
        return []
    begin, end = first[0][0], first[-1][1]
    gaps: Intervals = []
    for start, stop in second:
        if start > begin:
            gaps.append((begin, min(start, end)))
        begin = max(begin, stop)
        if begin >= end:
            break
    if begin < end:
        gaps.append((begin, end))
    return common(first, [gap for gap in gaps if gap[0] < gap[1]])
