"""The checks inside a benchmark: the time of a method is only meaningful if its result is right.

The exact check uses 0/1 inputs whose sums the dtype represents exactly, and compares with ``atol = rtol = 0``, so that
it detects a wrong rank order or a stale chunk. The rounding check compares results of normal inputs with float64, by
``||out - ref|| / ||ref||``. Before each check, outputs are filled with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.utils.deterministic as deterministic

from bench.harness.case import Case


@dataclass(frozen=True)
class Checked:
    """The outcome of both checks on one rank."""

    exact: bool
    relative_error: float
    bound: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.exact and self.relative_error <= self.bound


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, memory that an op allocates with ``torch.empty`` starts as NaN, which shows elements it did not write."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def error_bound(case: Case) -> float:
    """Return the largest relative error that rounding alone can explain.

    Each rank's partial sum is rounded to the output dtype once. These rounding errors add up like a random walk
    (``eps * sqrt(world)``). So do the errors of accumulating `case.terms` products in float32 (float64 for float64).
    """
    accumulate = torch.float64 if case.dtype == torch.float64 else torch.float32
    rounding = torch.finfo(case.dtype).eps * case.world**0.5
    return float(rounding + torch.finfo(accumulate).eps * case.terms**0.5)


def first_difference(name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return an empty string if shape and all elements are equal, else the first difference and the number of them."""
    if found.shape != expected.shape:
        return f"{name} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    wrong = found.double() != expected  # NaN differs from everything, so remaining poison counts as wrong
    count = int(wrong.sum())
    if count == 0:
        return ""
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return f"{name}{list(at)} is {found[at].item()}, expected {expected[at].item()}; {count} of {wrong.numel()} differ"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``||found - expected|| / ||expected||`` in float64. NaN in `found` gives NaN, which meets no bound."""
    return float(torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected))
