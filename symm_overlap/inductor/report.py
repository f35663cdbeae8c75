"""The report of the pass: one line for each collective, with the reason if it was not fused."""

from __future__ import annotations

import os
import re
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Site:
    """A collective in a graph.

    Attributes:
        collective: its name, such as "all_gather_into_tensor".
        where: file and line of the user's code, "?" if the graph does not know them.
        moved: bytes that one rank sends, and receives (`symm_overlap.inductor.moved`); None if sizes are symbolic.
        matmuls: the number of matmuls that it was fused with.
        path: the path that the chooser would choose, if the sizes are known.
        reason: why it was skipped; empty if it was fused.
        candidate: whether a matmul feeds or follows it.
    """

    collective: str
    where: str
    moved: int | None = None
    matmuls: int = 0
    path: str = ""
    reason: str = ""
    candidate: bool = True

    @property
    def fused(self) -> bool:
        """True if the collective was replaced."""
        return not self.reason

    def __str__(self) -> str:
        result = f"fused with {self.matmuls} matmul{'s' if self.matmuls > 1 else ''}"
        result += f", {self.path}" if self.path else ""
        moved = "" if self.moved is None else f", {self.moved} bytes moved"
        return f"{self.where}: {self.collective}{moved}: {result if self.fused else 'skipped: ' + self.reason}"


@dataclass(frozen=True)
class GraphReport:
    """The collectives of one graph.

    Attributes:
        sites: one site for each collective.
        by_hand: whether the graph had ops of this package before the pass. This includes graphs inside it (regions and
            branches). A graph inside another one counts as such a graph too, as the other one may have collectives.
        cached: whether the graph came from one of torch's caches.
    """

    sites: tuple[Site, ...]
    by_hand: bool = False
    cached: bool = False

    @property
    def fused(self) -> int:
        """The number of collectives that were fused."""
        return sum(site.fused for site in self.sites)

    @property
    def candidates(self) -> tuple[Site, ...]:
        """The collectives that a matmul feeds or follows."""
        return tuple(site for site in self.sites if site.candidate)

    @property
    def skipped(self) -> tuple[Site, ...]:
        """The candidates that were not fused."""
        return tuple(site for site in self.candidates if not site.fused)

    @property
    def complaint(self) -> str:
        """The warning for a graph in which nothing was fused; empty for every other graph."""
        if self.candidates:
            return "" if self.fused else f"symm_overlap: nothing was fused in this graph:\n{self}"
        if self.by_hand:
            return ""
        return "symm_overlap: this graph has no collective beside a matmul, so nothing was fused"

    @property
    def memo(self) -> list[dict[str, Any]]:
        """The sites in a form that JSON can store."""
        return [asdict(site) for site in self.sites]

    def __str__(self) -> str:
        summary = f"{self.fused} of {len(self.candidates)} collectives beside a matmul fused"
        return "\n".join([*map(str, self.sites), summary])


@dataclass(frozen=True)
class Report:
    """Everything that this process has compiled, or taken from a cache, since its start or the last `clear`.

    ``print`` it.

    Attributes:
        graphs: one report for each graph.
    """

    graphs: tuple[GraphReport, ...]

    @property
    def fused(self) -> int:
        """The number of collectives that were fused."""
        return sum(graph.fused for graph in self.graphs)

    @property
    def skipped(self) -> tuple[Site, ...]:
        """The collectives beside a matmul that were not fused."""
        return tuple(site for graph in self.graphs for site in graph.skipped)

    def __str__(self) -> str:
        return "\n\n".join(
            f"graph {number}{', from the cache' if graph.cached else ''}:\n{graph}"
            for number, graph in enumerate(self.graphs)
        )


_graphs: list[GraphReport] = []


def record(graph: GraphReport, warn: bool = True) -> None:
    """Add a graph to the report, and warn if nothing was fused in it. SYMM_OVERLAP_COMPILE_REPORT=1 also prints it."""
    _graphs.append(graph)
    if warn and graph.complaint:
        warnings.warn(graph.complaint, stacklevel=2)
    if os.environ.get("SYMM_OVERLAP_COMPILE_REPORT", "0") not in ("", "0"):
        rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
        cached = " from the cache" if graph.cached else ""
        print(f"symm_overlap, {rank}one graph{cached}:\n{graph}", file=sys.stderr, flush=True)


def recorded() -> Report:
    """Return the report on what was recorded so far."""
    return Report(tuple(_graphs))


def clear() -> None:
    """Empty the report."""
    _graphs.clear()


def place_of(node: Node) -> str:
    """Return file and line of the user's code that a node comes from, "?" if unknown.

    This is the innermost frame that is not torch's. If all frames are torch's, it is the innermost frame.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return ":".join(frames[-1]) if frames else "?"
