"""Graphs that come from torch's caches. The pass does not run for them. But torch keeps with every cached graph how
much its compilation added to the counters of Inductor, and adds the same again when the graph is taken from a cache. So
the report of a graph is the name of a counter.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ._torch import counters
from .report import GraphReport, Report, Site, record, recorded

_PREFIX = "symm_overlap "
_known: Counter[str] = Counter()  # how often the report of each counter has been recorded


def report() -> Report:
    """What was fused so far, and why not where it was not."""
    find_cached()
    return recorded()


def keep(report: GraphReport) -> None:
    """Let the report travel with the graph that is being compiled."""
    memo = {"sites": report.memo, "by_hand": report.by_hand}
    name = _PREFIX + json.dumps(memo, separators=(",", ":"))
    counters()[name] += 1
    _known[name] += 1


def find_cached(_: Any = None) -> None:
    """Add graphs that have been taken from a cache since the last call to the report."""
    now = Counter({name: count for name, count in counters().items() if name.startswith(_PREFIX)})
    new = now - _known
    _known.clear()
    _known.update(now)  # a user may have cleared the counters
    for name in new.elements():
        memo = json.loads(name.removeprefix(_PREFIX))
        sites = tuple(Site(**site) for site in memo["sites"])
        record(GraphReport(sites, memo["by_hand"], cached=True))
