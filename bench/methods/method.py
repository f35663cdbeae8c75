"""A row of the benchmark: its name, the ops it supports, and its setup for one case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import NotAvailableError
from bench.harness.case import OPS, Case
from bench.harness.launch import Rank
from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.runtime import backend_of

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""``multiply(a, b, out)``"""


def _nothing(*_: str) -> None:
    return None


@dataclass
class Prepared:
    """A method that is set up for a case. All work that need not be repeated is done.

    Attributes:
        call: makes one call.
        results: returns the results of a call by name: ``output``, and ``gathered`` if there is one. None if the
            numbers are meaningless, as for a bound.
        load: runs after the inputs have changed, with their new kind (`bench.harness.case.inputs`).
        poison: fills buffers that outlive a call with NaN.
        around: the context in which calls run, entered outside the timed part.
        exactly: the context in which a call also runs if its results are checked. Other calls may leave out work that
            a benchmark only emulates.
        operations: the number of operations in a call.
        choice: returns how the chooser arranges the calls, if they are our ops. Called inside ``around``.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Mapping[str, torch.Tensor]] | None
    load: Callable[[str], None] = _nothing
    poison: Callable[[], None] = _nothing
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    exactly: Callable[[], AbstractContextManager[object]] = nullcontext
    operations: int = 1
    choice: Callable[[], Choice] | None = None


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        prepare: sets the method up, for a rank, a case and this rank's inputs, which stay the same tensors throughout.
        plain: whether the method itself calls the collectives of the group's library.
    """

    name: str
    title: str
    prepare: Callable[[Rank, Case, torch.Tensor, torch.Tensor], Prepared]
    ops: tuple[str, ...] = tuple(OPS.values())
    plain: bool = False


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply as programs do."""
    torch.mm(a, b, out=out)


def multiply_of_ours(rank: Rank, case: Case) -> Multiply:
    """Return the matmul that the ops call internally, if it is not torch's."""
    backend = backend_of(rank.device.type)
    if backend.calls_torch(case.dtype):
        raise NotAvailableError("ours calls torch.mm")
    return backend.multiply


def pair(returned: Any) -> dict[str, torch.Tensor]:
    """Return the results of a call that returned ``(output, gathered)``."""
    output, gathered = returned
    return {"output": output, "gathered": gathered}


def single(returned: Any) -> dict[str, torch.Tensor]:
    """Return the results of a call that returned only the output."""
    return {"output": returned}
