"""Ranges in the traces of profilers: one around each call, and in it one around each step.

They are recorded only while a profiler records: torch's, or `torch.autograd.profiler.emit_nvtx`, which passes them on
to Nsight Systems. Steps that are issued without Python get their ranges in csrc/issue/program.cpp.
`symm_overlap.profile` reads the traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch.profiler import record_function

from ...plan import Step, Table
from ...plan.ranges import range_of
from ..choice import Choice
from ..problem import Problem, problem
from .call import Call

PREFIX = "symm_overlap call: "


def range_of_call(described: Problem, choice: Choice, rank: int) -> str:
    """Return the name of a call's range: the call in words, and then what `called` reads."""
    facts = {
        "op": described.op,
        "m": described.m,
        "n": described.n,
        "k": described.k,
        "dtype": str(described.dtype).removeprefix("torch."),
        "world": described.world,
        "rank": rank,
        "device": described.device,
        "last": int(described.last),
        "path": choice.path,
        "exchange": choice.exchange,
        "chunks": choice.chunks,
        "whole": int(choice.whole),
        "one_shot": int(choice.one_shot),
        "compute": ",".join(choice.compute),
        "copy": choice.copy,
        "copies": choice.copies,
    }
    return f"{PREFIX}{described}; " + " ".join(f"{key}={value}" for key, value in facts.items())


@lru_cache(maxsize=1024)
def called(name: str) -> tuple[Problem, Choice, int] | None:
    """Return the problem and the choice of the call that a range is named after, and the rank that made the call.

    None if the range is not a call's, or that of another version of this package. The problem is without the arguments
    of the call.
    """
    text, separator, facts = name.rpartition("; ")
    if not separator or not text.startswith(PREFIX):
        return None
    try:
        return _read(dict(fact.split("=", 1) for fact in facts.split(" ")))
    except (KeyError, ValueError, AttributeError):
        return None


def _read(facts: Mapping[str, str]) -> tuple[Problem, Choice, int]:
    numbers = {key: int(value) for key, value in facts.items() if value.isdecimal()}
    described = problem(
        facts["op"],
        *(numbers[key] for key in ("m", "n", "k")),
        getattr(torch, facts["dtype"]),
        numbers["world"],
        facts["device"],
        last_dim=bool(numbers["last"]),
    )
    choice = Choice(
        facts["path"],
        facts["exchange"],
        "read from a trace",
        numbers["chunks"],
        bool(numbers["whole"]),
        bool(numbers["one_shot"]),
        tuple(facts["compute"].split(",")),
        facts["copy"],
        numbers["copies"],
    )
    return described, choice, numbers["rank"]


def around(call: Call) -> AbstractContextManager[object]:
    """Return a range around a call, to be entered while a profiler records."""
    return record_function(range_of_call(call.problem, call.choice, call.rank))


class Ranged:
    """An exchange, with a range around the call that it carries out."""

    def __init__(self, exchange: ModuleType, call: Call) -> None:
        self._exchange, self._call = exchange, call

    def __getattr__(self, name: str) -> Callable[..., None]:
        function, call = getattr(self._exchange, name), self._call

        def run(*args: Any) -> None:
            with around(call):
                function(*args)

        return run


def ranged(table: Table) -> Table:
    """Return the functions that run the steps of a plan, with a range around each step."""

    def within(function: Callable[[Step], object]) -> Callable[[Step], object]:
        def run(step: Step) -> object:
            with record_function(range_of(step)):
                return function(step)

        return run

    functions: Mapping[str, Callable[[Step], object]] = {kind: within(each) for kind, each in table.items()}
    return functions
