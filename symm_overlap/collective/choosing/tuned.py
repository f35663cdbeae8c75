"""What a group has measured: for calls of one kind, how long each candidate took, and so which candidate is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..problem import Problem
from .candidates import Candidate


@dataclass(frozen=True)
class Tuned:
    """The measurements for calls of one kind.

    Attributes:
        times: for each candidate, its time in milliseconds: each rank's median over its calls, then the largest over
            ranks.
    """

    times: tuple[tuple[Candidate, float], ...]

    def best(self, allowed: Callable[[Candidate], bool] = lambda candidate: True) -> Candidate | None:
        """Return the quickest candidate, the first one if several are equal; None if there is none.

        Args:
            allowed: whether the call can be carried out so. Calls of one kind may differ in this.
        """
        times = [each for each in self.times if allowed(each[0])]
        return min(times, key=lambda each: each[1])[0] if times else None

    def __str__(self) -> str:
        measured = "; ".join(f"{candidate.name} {time:.3f} ms" for candidate, time in self.times)
        return f"measured by autotune: {measured}"


def tuned_for(measured: Mapping[tuple[str, str], Tuned], problem: Problem, order: str | None) -> Tuned | None:
    """Return the measurements for exactly this call, or else those for a call of its kind.

    ``measured`` is indexed by the kind of device and one of the `keys_of` the call.
    """
    found = (measured.get((problem.device, words)) for words in (keys_of(problem, order) if measured else ()))
    return next((entry for entry in found if entry is not None), None)


def keys_of(problem: Problem, order: str | None) -> tuple[str, str]:
    """Return a call in words, and its kind: the properties of a call that decide which path is about the quickest.

    Args:
        order: the order in which sums are computed (`Settings.order`). In any order, sums may use another library's
            collective.
    """
    part = f"m={problem.m} n={problem.n} k={problem.k} rows={problem.rows} nbytes={problem.nbytes}"
    kind = f"{problem.op} {part} {str(problem.dtype).removeprefix('torch.')}"
    if problem.factors != problem.dtype and not problem.op_kind.scaled:
        kind += f", factors {str(problem.factors).removeprefix('torch.')}"
    summed = "" if order != "any" or problem.op_kind.gathers else ", summed in any order"
    return f"{problem}{summed}", f"{kind}{summed}"
