"""Reports of graphs that come from torch's caches, for which the pass does not run.

torch stores with every cached graph what its compilation added to the counters of Inductor. When the graph is taken
from a cache, torch adds the same again. So the report of a graph is stored as the name of a counter.
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
    """Return the report on everything compiled so far: what was fused, and the reason for what was not.

    Returns:
        A `Report`, with one `GraphReport` for each graph and one `Site` for each collective. ``print`` it.
    """
    find_cached()
    return recorded()


def keep(report: GraphReport) -> None:
    """Store the report with the graph that is being compiled, for torch's caches."""
    memo = {"sites": report.memo, "by_hand": report.by_hand}
    name = _PREFIX + json.dumps(memo, separators=(",", ":"))
    counters()[name] += 1
    _known[name] += 1


def find_cached(_: Any = None) -> None:
    """Add to the report the graphs that have been taken from a cache since the last call."""
    now = Counter({name: count for name, count in counters().items() if name.startswith(_PREFIX)})
    new = now - _known
    _known.clear()
    _known.update(now)  # a user may have cleared the counters
    for name in new.elements():
        memo = json.loads(name.removeprefix(_PREFIX))
        sites = tuple(Site(**site) for site in memo["sites"])
        record(GraphReport(sites, memo["by_hand"], cached=True))
