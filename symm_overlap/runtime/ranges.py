"""Ranges in the traces of profilers: one around each call, and in it one around each step.

They are recorded only while a profiler records: torch's, or `torch.autograd.profiler.emit_nvtx`, which passes them on
to Nsight Systems. Steps that are issued without Python get their ranges in csrc/issue/program.cpp.
`symm_overlap.profile` reads the traces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from .. import _C
from ..plan import Step, Table
from ..plan.ranges import range_of


def around(name: Callable[[], str]) -> AbstractContextManager[object]:
    """Return a range, whose name is computed only if a profiler records."""
    return record_function(name()) if _C.profiled() else nullcontext()


def ranged(table: Table) -> Table:
    """Return the functions that run the steps of a plan, with a range around each step if a profiler records."""
    return {kind: _within(function) for kind, function in table.items()} if _C.profiled() else table


def _within(function: Callable[[Step], object]) -> Callable[[Step], object]:
    def run(step: Step) -> object:
        with record_function(range_of(step)):
            return function(step)

    return run
