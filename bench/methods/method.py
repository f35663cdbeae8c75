"""A row of the benchmark: its name, the ops it knows, and how it is set up for one case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import NotAvailableError
from bench.harness.case import OPS, Case
from bench.harness.launch import Rank
from symm_overlap.runtime import backend_of

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""``multiply(a, b, out)``"""


def _nothing(*_: str) -> None:
    return None


@dataclass
class Prepared:
    """A method that is set up: everything that need not be repeated is done, `call` does one operation.

    `results` names what `call` returned (``output``, and ``gathered`` where there is one); None when the numbers mean
    nothing, as for a bound. `load` runs after the inputs have changed, and is told of which
    kind they are now (`bench.harness.case.inputs`); `poison` fills buffers that outlive a call with
    NaN; `around` is entered around calls, outside the timed part. A call makes so many `operations`.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Mapping[str, torch.Tensor]] | None
    load: Callable[[str], None] = _nothing
    poison: Callable[[], None] = _nothing
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    operations: int = 1


@dataclass(frozen=True)
class Method:
    """One row: `prepare` gets the rank, the case and this rank's inputs, which stay the same tensors all along.

    A `plain` one calls the collectives of the group's library itself.
    """

    name: str
    title: str
    prepare: Callable[[Rank, Case, torch.Tensor, torch.Tensor], Prepared]
    ops: tuple[str, ...] = tuple(OPS.values())
    plain: bool = False


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The matmul as a program calls it."""
    torch.mm(a, b, out=out)


def multiply_of_ours(rank: Rank, case: Case) -> Multiply:
    """The matmul that the ops call inside, where it is not torch's."""
    backend = backend_of(rank.device.type)
    if backend.calls_torch(case.dtype):
        raise NotAvailableError("ours calls torch.mm")
    return backend.multiply


def pair(returned: Any) -> dict[str, torch.Tensor]:
    """Results of a call that returned ``(output, gathered)``."""
    output, gathered = returned
    return {"output": output, "gathered": gathered}


def single(returned: Any) -> dict[str, torch.Tensor]:
    """Results of a call that returned the output alone."""
    return {"output": returned}
