"""Context managers for calls of the ops in tests. They change the functions of plan steps, the traits, and settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from bench.harness.unrepeated import unrepeated
from symm_overlap.collective.choosing import chooser
from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.exchange import Call
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.runtime import group
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.settings import applied, current, environment, transformed


def forget_routes() -> None:
    """Clear the routes of every group, so that the next call chooses again.

    Programs never need this, because their environment and traits do not change.
    """
    for state in list(group._states.values()):
        state.forget_routes()


def comparing(on: bool) -> AbstractContextManager[None]:
    """Switch the comparison of calls in words on or off, as SYMM_OVERLAP_CHECK does for a program."""
    return applied(replace(current(), compare=on))


@contextmanager
def comparing_in_threads(on: bool) -> Iterator[None]:
    """Do the same as `comparing` for all threads of this process. `comparing` affects only its own thread."""
    try:
        with mock.patch.dict(os.environ, {"SYMM_OVERLAP_CHECK": str(int(on))}):
            environment.cache_clear()
            forget_routes()
            yield
    finally:
        environment.cache_clear()
        forget_routes()


@contextmanager
def in_place(yes: bool) -> Iterator[None]:
    """Set the trait ``in_place``. With False, plans are those of a GPU, which copies peers' data before using it."""
    try:
        with mock.patch.object(CpuBackend, "traits", replace(CpuBackend.traits, in_place=yes)):
            forget_routes()
            yield
    finally:
        forget_routes()


def make_room(group: dist.ProcessGroup, nbytes: int) -> None:
    """Ensure that the current lane has a workspace of at least ``nbytes`` bytes."""
    with symm_overlap.prepare(), symm_overlap.force_path("pipelined"):
        symm_overlap.all_gather(torch.empty(-(-nbytes // 4)), 0, group)


def poisoned_outputs() -> AbstractContextManager[object]:
    """Inside, new outputs are filled with NaN, as memory of freed tensors might be. Elements that a call does not write
    are then NaN in its result.
    """

    def poisoned(backend: CpuBackend, like: Tensor, *shape: int) -> Tensor:
        return like.new_full(shape, float("nan"))

    return mock.patch.object(CpuBackend, "new_output", poisoned)


@contextmanager
def one_shot(yes: bool) -> Iterator[None]:
    """Inside, every rank of an all-reduce sums the whole tensor, whatever its size. With False, each sums a part."""
    traits = replace(chooser.TRAITS["cpu"], most_bytes_in_one_shot=1 << 60 if yes else -1)
    try:
        with mock.patch.dict(chooser.TRAITS, cpu=traits):
            chooser._choose.cache_clear()
            forget_routes()
            yield
    finally:
        chooser._choose.cache_clear()
        forget_routes()


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield a list to which the kinds of the steps that this rank runs are added."""
    kinds: list[str] = []

    def note(plan: Plan, table: Table) -> Table:
        def run(kind: str) -> Callable[[Step], object]:
            def step(step: Step) -> object:
                kinds.append(kind)
                return table[kind](step)

            return step

        return {kind: run(kind) for kind in table}

    with transformed(note):
        yield kinds


@contextmanager
def at(kind: str, number: int, act: Callable[[Step], None]) -> Iterator[None]:
    """Call ``act`` just before the ``number``-th step of a kind, counted from 0 over all calls."""
    left = number

    def instrument(plan: Plan, table: Table) -> Table:
        def run(step: Step) -> None:
            nonlocal left
            if left == 0:
                act(step)
            left -= 1
            table[kind](step)

        return {**table, kind: run}

    with transformed(instrument):
        yield


@contextmanager
def choices() -> Iterator[list[tuple[str, Choice]]]:
    """Yield a list to which the op and the choice of every call are added, from all threads. No call is repeated."""
    made: list[tuple[str, Choice]] = []
    original = Call.__init__

    def recording(self: Call, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append((self.op, self.choice))

    with mock.patch.object(Call, "__init__", recording), unrepeated():
        yield made
