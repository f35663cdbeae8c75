"""What a group has measured: for a kind of calls, how long each candidate took, and so which one is taken."""

from __future__ import annotations

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

    @property
    def best(self) -> Candidate:
        """The quickest candidate; the first one of equals."""
        return min(self.times, key=lambda each: each[1])[0]

    def __str__(self) -> str:
        measured = ", ".join(f"{_name(candidate)} {time:.3f} ms" for candidate, time in self.times)
        return f"measured by autotune: {measured}"


def _name(candidate: Candidate) -> str:
    path, chunks = candidate
    return path if path == "sequential" else f"{path} with {chunks} chunk{'s' if chunks > 1 else ''}"


def kind_of_call(problem: Problem) -> str:
    """What calls have in common for which the same path is quickest. Part of a key in files, so it stays as it is."""
    part = f"m={problem.m} n={problem.n} k={problem.k} rows={problem.rows} nbytes={problem.nbytes}"
    return f"{problem.op} {part} {str(problem.dtype).removeprefix('torch.')}"
