"""What the compiler pass did to the compiled model, in few lines: layers that are alike share one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any


def fused_lines(report: Any) -> list[str]:
    """A `symm_overlap.inductor.Report` as lines: how much was fused, and for each graph its collectives.

    Collectives of one line of code, and of one fate, are counted. Files are shown by their names.
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
