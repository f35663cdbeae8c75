"""Tests on CPU ranks of the conditions of GPU tests: sleeps before steps, and a mode that sees the calls of steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import symm_overlap
from symm_overlap.settings import transformed
from tests.gpu import conditions
from tests.gpu.conditions import Conditions, random_sleeps, run_under, seen_by
from tests.ranks import Pool, Rank
from tests.transforms import recorded


class Seen(TorchDispatchMode):
    """Records the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def call(me: Rank) -> None:
    with symm_overlap.force_path("pipelined", chunks=2):
        symm_overlap.all_gather_matmul(torch.ones(4, 3), [torch.ones(3, 5)], 0, me.group)


def what_is_seen(me: Rank) -> tuple[list[str], list[str]]:
    whole, steps = Seen(), Seen()
    with whole:
        call(me)
    with steps, transformed(seen_by(steps)):
        call(me)
    return whole.names, steps.names


def test_a_mode_sees_the_matmuls_inside_an_op_only_with_the_transform(ranks: Pool) -> None:
    """torch's sanitizer is such a mode. It is disabled while it calls an op."""
    for whole, steps in ranks.run(2, what_is_seen):
        assert "symm_overlap::fused_all_gather_matmul" in whole
        assert "symm_overlap::fused_all_gather_matmul" in steps
        assert not any("mm" in name for name in whole if name.startswith("aten::"))
        assert sum("mm" in name for name in steps if name.startswith("aten::")) == 4  # two ranks' rows in two chunks


def sleeps_and_steps(me: Rank) -> tuple[list[float], int]:
    with (
        mock.patch.object(conditions, "time") as clock,
        recorded() as kinds,
        transformed(random_sleeps(me.device, f"7 {me.rank}")),
    ):
        call(me)
    return [each.args[0] for each in clock.sleep.call_args_list], len(kinds)


def test_every_step_sleeps_before_it_runs_and_every_rank_otherwise(ranks: Pool) -> None:
    (one, steps), (other, _) = ranks.run(2, sleeps_and_steps)
    assert len(one) == len(other) == steps > 4
    assert len({*one, *other}) == 2 * steps
    assert all(0 <= seconds <= conditions.LONGEST_SLEEP for seconds in one)


def sleeping_calls(me: Rank) -> int:
    with mock.patch.object(conditions, "time") as clock:
        run_under(me, Conditions(sleeps=7), call)
        return int(clock.sleep.call_count)


def test_conditions_are_those_of_the_function(ranks: Pool) -> None:
    assert min(ranks.run(2, sleeping_calls)) > 4
