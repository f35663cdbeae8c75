"""The ways to carry out a call among which the chooser predicts, and `autotune` measures, the quickest."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime import TRAITS
from ..planners.builder import span_sizes
from ..problem import Problem

CHUNKS = (1, 2, 4)
"""The numbers of chunks among which a call in chunks chooses."""

SPANS = (2, 3, 4, 8)
"""How many peers' parts one matmul may cover, among which a pipelined call chooses besides 1."""


class Candidate(NamedTuple):
    """A way to carry out a call.

    Attributes:
        path: see `symm_overlap.collective.choosing.chooser`.
        chunks: how many chunks each rank's part is cut into.
        span: how many peers' parts one matmul covers at most.
    """

    path: str
    chunks: int = 1
    span: int = 1

    @property
    def name(self) -> str:
        """The candidate in words."""
        if self.path in ("sequential", "single"):
            return self.path
        return f"{self.path}, {parts_in_words(self.chunks, self.span)}"


def parts_in_words(chunks: int, span: int) -> str:
    """Return into how many chunks parts are cut, or how many parts one matmul covers at most."""
    return f"span {span}" if span > 1 else f"{chunks} chunk{'s' if chunks > 1 else ''}"


def possible(candidate: Candidate, problem: Problem, direct: bool) -> bool:
    """Return whether a call can be carried out so; ``direct``: whether the ranks can reach each other's memory."""
    path, chunks, span = candidate
    if path in ("pipelined", "fused") and not direct:
        return False
    return (path != "fused" or problem.fusible) and span == span_of(problem, path, chunks, span)


def ladders(problem: Problem, path: str, chunks: int | None = None, span: int | None = None) -> list[list[Candidate]]:
    """Return the candidates on a path: first those with more and more chunks, then those with longer and longer spans.

    Where parts are read in the peers' memory, spans would need copies of them, so there are none unless one is asked
    for.

    Args:
        chunks, span: the only allowed values; None allows all.
    """
    if path == "sequential":
        return [[Candidate(path)]]
    considered = SPANS if chunks is None and not TRAITS[problem.device].in_place else ()
    most = considered if span is None else (span,)
    spans = [*dict.fromkeys(span_of(problem, path, chunks or 1, each) for each in most)]
    spanned = [Candidate(path, 1, each) for each in spans if each > 1]
    if span is not None and spanned:
        return [spanned]
    cuts = (chunks,) if chunks is not None else CHUNKS[:2] if path == "c10d" else CHUNKS
    return [[*dict.fromkeys(Candidate(path, min(each, max(1, problem.rows))) for each in cuts)], spanned]


def span_of(problem: Problem, path: str, chunks: int, asked: int) -> int:
    """Return how many parts one matmul covers at most, if it may cover ``asked``."""
    if path != "pipelined" or chunks > 1 or not problem.spannable:
        return 1
    return max(span_sizes(problem.world - 1, asked), default=1)
