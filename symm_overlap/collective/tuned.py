"""What a group has measured: for a kind of calls, how long each candidate took, and so which one is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .problem import Problem

Candidate = tuple[str, int]
"""A path, and a number of chunks."""


@dataclass(frozen=True)
class Tuned:
    """What was measured for calls of one kind.

    Attributes:
        times: for each candidate, milliseconds: the median of every rank's calls, and then the largest over ranks.
    """

    times: tuple[tuple[Candidate, float], ...]

    def best(self, fusible: bool = True) -> Candidate | None:
        """The quickest candidate, the first one of equals; None if there is none.

        Args:
            fusible: whether there is a kernel for the call; calls of one kind may differ in that.
        """
        possible = [each for each in self.times if fusible or each[0][0] != "fused"]
        return min(possible, key=lambda each: each[1])[0] if possible else None

    def __str__(self) -> str:
        measured = ", ".join(f"{_name(candidate)} {time:.3f} ms" for candidate, time in self.times)
        return f"measured by autotune: {measured}"


def _name(candidate: Candidate) -> str:
    path, chunks = candidate
    return path if path == "sequential" else f"{path} with {chunks} chunk{'s' if chunks > 1 else ''}"


def tuned_for(measured: Mapping[tuple[str, str], Tuned], problem: Problem) -> Tuned | None:
    """What was measured for this very call, else for one of its kind. Both are keys beside the kind of
    device: the call in words, and `kind_of_call`.
    """
    kind = problem.device
    return (measured.get((kind, str(problem))) or measured.get((kind, kind_of_call(problem)))) if measured else None


def kind_of_call(problem: Problem) -> str:
    """What calls have in common for which about the same path is quickest."""
    part = f"m={problem.m} n={problem.n} k={problem.k} rows={problem.rows} nbytes={problem.nbytes}"
    return f"{problem.op} {part} {str(problem.dtype).removeprefix('torch.')}"
