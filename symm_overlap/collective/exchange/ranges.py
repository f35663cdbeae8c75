"""The range around a call of an op in the trace of a profiler: what was called, and how it was carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from ...plan.ranges import call_of, range_of_call
from ...runtime import TRAITS, around
from ..choosing.choice import Choice
from ..problem import Problem, problem
from .call import Call


def name_of_range(described: Problem, choice: Choice, rank: int) -> str:
    """Return the name of a call's range; `called` reads it."""
    return range_of_call(
        str(described),
        described.device,
        rank,
        described.world,
        op=described.op,
        m=described.m,
        n=described.n,
        k=described.k,
        dtype=str(described.dtype).removeprefix("torch."),
        last=int(described.last),
        path=choice.path,
        exchange=choice.exchange,
        chunks=choice.chunks,
        whole=int(choice.whole),
        one_shot=int(choice.one_shot),
        compute=",".join(choice.compute),
        copy=choice.copy,
        copies=choice.copies,
        span=choice.span,
    )


@lru_cache(maxsize=1024)
def called(name: str) -> tuple[Problem, Choice] | None:
    """Return the problem and the choice of the call that a range is named after.

    None if the range is not that of a call of an op, or that of another version of this package. The problem is without
    the arguments of the call.
    """
    found = call_of(name)
    try:
        return None if found is None else _read(found[1])
    except (KeyError, ValueError, AttributeError, ZeroDivisionError):
        return None


def _read(facts: Mapping[str, str]) -> tuple[Problem, Choice]:
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
        numbers["span"],
    )
    if described.device not in TRAITS or min(described.world, choice.chunks, choice.copies, choice.span) < 1:
        raise ValueError("another version has recorded this call")
    return described, choice


class Ranged:
    """An exchange, with a range around the call that it carries out."""

    def __init__(self, exchange: ModuleType, call: Call) -> None:
        self._exchange, self._call = exchange, call

    def __getattr__(self, name: str) -> Callable[..., None]:
        function, call = getattr(self._exchange, name), self._call

        def run(*args: Any) -> None:
            with around(lambda: name_of_range(call.problem, call.choice, call.rank)):
                function(*args)

        return run
