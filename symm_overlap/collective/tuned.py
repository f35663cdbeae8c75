"""What a group has measured: for a kind of calls, how long each candidate took, and so which one is taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..settings import PATHS
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

    def best(self, paths: Collection[str] = PATHS) -> Candidate | None:
        """The quickest candidate, the first one of equals; None if there is none.

        Args:
            paths: those that the call can take; calls of one kind may differ in that.
        """
        possible = [each for each in self.times if each[0][0] in paths]
        return min(possible, key=lambda each: each[1])[0] if possible else None

    def __str__(self) -> str:
        measured = ", ".join(f"{_name(candidate)} {time:.3f} ms" for candidate, time in self.times)
        return f"measured by autotune: {measured}"


def _name(candidate: Candidate) -> str:
    path, chunks = candidate
    return path if path == "sequential" else f"{path} with {chunks} chunk{'s' if chunks > 1 else ''}"


def tuned_for(measured: Mapping[tuple[str, str], Tuned], problem: Problem, order: str | None) -> Tuned | None:
    """What was measured for this very call, else for one of its kind: the entry of one of `keys_of` the call, each
    beside the kind of device.
    """
    found = (measured.get((problem.device, words)) for words in (keys_of(problem, order) if measured else ()))
    return next((entry for entry in found if entry is not None), None)


def keys_of(problem: Problem, order: str | None) -> tuple[str, str]:
    """A call in words, and its kind: what calls have in common for which about the same path is quickest.

    Args:
        order: in which sums are made (`Settings.order`); in any order they may be another library's own.
    """
    part = f"m={problem.m} n={problem.n} k={problem.k} rows={problem.rows} nbytes={problem.nbytes}"
    kind = f"{problem.op} {part} {str(problem.dtype).removeprefix('torch.')}"
    summed = "" if order != "any" or problem.sort.gathers else ", summed in any order"
    return f"{problem}{summed}", f"{kind}{summed}"
