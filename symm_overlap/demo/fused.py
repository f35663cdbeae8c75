"""A short report of what the compiler pass fused in the compiled model. Equal layers share one line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any


def fused_lines(report: Any) -> list[str]:
    """Format a `symm_overlap.inductor.Report` as lines: how much was fused, and the collectives of each graph.

    Collectives from the same line of code and with the same outcome share a line with their count. Files are shown
    without their folder.
    """
    skipped = len(report.skipped)
    lines = [
        f"the pass fused {report.fused} of {report.fused + skipped} collectives beside a matmul, {skipped} skipped"
    ]
    for number, graph in enumerate(report.graphs):
        lines.append(f"graph {number}: {graph.fused} of {len(graph.candidates)}")
        counts = Counter(f"{Path(site.where).name}{str(site).removeprefix(site.where)}" for site in graph.sites)
        lines += [f"  {count} x {line}" for line, count in counts.items()]
    return lines
