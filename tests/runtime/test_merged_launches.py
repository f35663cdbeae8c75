"""Steps that are merged into one launch: which steps these are, and what the stand-in for a GPU then launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import symm_overlap
from bench.emulation.launches import EmulatedStandIn
from bench.emulation.link import Link
from bench.harness.peerless import without_peers
from bench.harness.stand_in import StandIn, standing_in
from symm_overlap.collective.planners import produce_then_all_reduce
from symm_overlap.plan import Plan, Region, Step
from symm_overlap.runtime import Sum, Work, state_of
from symm_overlap.runtime.merged import launches
from symm_overlap.runtime.work import WorkOf


def whole_sum(me: StandIn, op: str) -> None:
    """Call an op in which 8 ranks compute a whole sum, without overlap."""
    small, large = torch.empty(16, 4), torch.empty(1000, 333)
    {
        "reduce_scatter": lambda: symm_overlap.reduce_scatter(small, "sum", 0, me.group),
        "all_reduce": lambda: symm_overlap.all_reduce(small, "sum", me.group),
        "large all_reduce": lambda: symm_overlap.all_reduce(large, "avg", me.group),
        "matmul_reduce_scatter": lambda: symm_overlap.matmul_reduce_scatter(small, small.t(), "sum", 0, me.group),
        "matmul_all_reduce": lambda: symm_overlap.matmul_all_reduce(small, small.t(), "sum", me.group),
    }[op]()


WHOLE_SUMS = {
    "reduce_scatter": ["copy tensor", "meet and sum"],
    "all_reduce": ["copy tensor", "meet and sum"],
    "large all_reduce": ["copy tensor", "meet and sum", "await and gather"],
    "matmul_reduce_scatter": ["multiply", "meet and sum"],
    "matmul_all_reduce": ["multiply", "meet and sum"],
}


@pytest.mark.parametrize("op", WHOLE_SUMS)
@pytest.mark.parametrize("rank", [0, 5])
def test_a_whole_sum_is_one_launch_in_which_ranks_meet_and_read_the_peers_memory(op: str, rank: int) -> None:
    with standing_in(rank, 8, path="sequential") as me:
        for _ in range(2):  # in either half of the workspace
            whole_sum(me, op)
            made = me.launched()
            assert [what for _, what, _ in made] == WHOLE_SUMS[op]
            summed = made[1][2]
            # In rank order, including this rank's own partial result.
            assert [f"workspace@{each}+" in word for each, word in enumerate(summed.split()[-8:])] == [True] * 8
    if op == "large all_reduce":
        channel, done_channel = summed.split(":")[0].split(", done on channel ")
        parts = made[2][2].split(": ")[-1].split()
        assert channel == "channel 0"
        assert made[2][2].startswith(f"channel {done_channel}: ")
        assert parts == ["-" if each == rank else f"workspace@{each}+{each * 41628 * 4}" for each in range(8)]


def test_a_launch_finds_its_tensors_whatever_steps_before_it_made() -> None:
    """The memory that a step allocates is freed, and a tensor that a later step reads may get the same address."""
    with standing_in(0, 2, path="sequential") as me:
        for rows in range(2, 60, 2):
            symm_overlap.matmul_reduce_scatter(torch.empty(4, rows, 5), torch.empty(5, 10), "sum", -1, me.group)
            made = me.launched()
            assert [what for _, what, _ in made] == ["make", "multiply", "copy tensor", "meet and sum"]
            assert made[-1][2].endswith(f"sum of {4 * rows * 5}: workspace@0+0 workspace@1+0")


def test_a_launch_ends_no_call_that_has_written_more_than_it() -> None:
    """If a call has outputs that the merged launch does not write, a separate launch ends the call."""
    with standing_in(0, 4, path="sequential") as me:
        op = torch.ops.symm_overlap.fused_matmuls_reduce_scatter_keep
        op([torch.empty(16, 8)], [torch.empty(8, 4)], None, "sum", 0, me.group.group_name, keep=[0])
        made = [what for _, what, _ in me.launched()]
    assert made[-2:] == ["meet and sum", "poison"]


def test_a_call_in_chunks_has_no_such_launch() -> None:
    """A pipelined call has no merged launches."""
    with standing_in(0, 4, path="pipelined", chunks=1) as me:
        symm_overlap.matmul_all_reduce(torch.empty(16, 8), torch.empty(8, 4), "sum", me.group)
        assert not {"meet and sum", "await and gather"} & {what for _, what, _ in me.launched()}


def plan_of(world: int = 3, **how: bool) -> Plan:
    return produce_then_all_reduce(0, world, in_place=True, **how)


def counts(plan: Plan, fused_meetings: bool = True, work: WorkOf | None = None) -> list[int]:
    """Return how many plan steps each launch contains."""
    memory = torch.zeros(plan.world, 3 * plan.world)
    tensors = {"output": torch.zeros(3 * plan.world)}

    def at(region: Region) -> torch.Tensor:
        whole = tensors["output"] if region.buffer == "output" else memory[region.rank]
        return whole[3 * region.start : 3 * region.stop]

    def described(step: Step) -> Sequence[Work] | None:
        if step.kind != "reduce":
            return None
        out, *copy = map(at, step.writes)
        return [Sum([at(region) for region in step.reads], False, out, *copy)]

    return [len(items) for items, _ in launches(plan, at, tensors, work or described, fused_meetings)]


def altered(plan: Plan, kind: str, **changes: Any) -> Plan:
    """Return the plan with its first step of this kind changed."""
    index = next(index for index, step in enumerate(plan.steps) if step.kind == kind)
    steps = [replace(step, **changes) if place == index else step for place, step in enumerate(plan.steps)]
    return replace(plan, steps=tuple(steps))


def test_steps_are_one_launch_only_as_they_are_in_the_plan() -> None:
    """Steps are merged only if they follow each other exactly as the planner arranges them."""
    plan = plan_of()
    kinds = [step.kind for step in plan.steps]
    assert kinds == ["fork", "produce", "signal", "wait", "reduce", "signal", "wait", "pull", "pull", "join"]
    assert counts(plan) == [1, 1, 4, 3, 1]
    alone = [1] * len(kinds)
    assert counts(plan, fused_meetings=False) == alone
    assert counts(plan_of_copies()) == [1] * len(plan_of_copies().steps), "no step reads peers' memory in place"
    assert counts(altered(plan, "signal", peers=(1,))) == [1, 1, 1, 1, 1, 1, 3, 1], "not all peers are signalled"
    assert counts(altered(plan, "wait", peers=(2,))) == [1, 1, 1, 1, 1, 1, 3, 1], "not all peers are awaited"
    assert counts(altered(plan, "wait", channel=1)) == [1, 1, 1, 1, 1, 1, 3, 1], "they meet on another channel"
    assert counts(altered(plan, "reduce", stream="other")) == [1, 1, 1, 1, 1, 1, 3, 1], "the sum is on another stream"
    assert counts(altered(plan, "pull", stream="other")) == [1, 1, 4, 1, 1, 1, 1], "a copy is on another stream"
    assert counts(altered(plan, "pull", writes=(Region("output", 0, 0, 1),))) == [1, 1, 4, 1, 1, 1, 1], (
        "a copy writes to another place"
    )
    assert counts(plan, work=lambda step: None) == [1, 1, 1, 1, 1, 1, 3, 1], "Python computes the sum"


def plan_of_copies() -> Plan:
    return produce_then_all_reduce(0, 3, in_place=False)


def test_an_event_between_steps_keeps_them_apart() -> None:
    """Another stream follows the wait, so an event must be recorded directly after the wait."""
    plan = plan_of()
    wait = next(index for index, step in enumerate(plan.steps) if step.kind == "wait")
    *steps, join = plan.steps
    late = Step("sleep", "other", after=(wait,))
    ended = replace(join, after=(*join.after, len(steps)))
    assert counts(replace(plan, steps=(*steps, late, ended))) == [1, 1, 1, 1, 1, 1, 3, 1, 1]


def test_a_launch_that_reads_across_an_emulated_link_takes_its_time() -> None:
    link = Link.parse("1GB/s")
    with (
        without_peers(0, 4, "cpu", lambda group, *where: EmulatedStandIn(group.size(), link)) as group,
        symm_overlap.force_path("sequential"),
    ):
        symm_overlap.all_reduce(torch.empty(1000, 333), "sum", group)
        workspace = state_of(group).lane(group, torch.device("cpu"), 0).workspace
        assert isinstance(workspace, EmulatedStandIn)
        made = workspace.launched()
    part, last = 4 * 83252, 4 * (333000 - 3 * 83252)  # bytes: a multiple of 16, and the rest for the last rank
    paces = ["0 ns", f"{3 * part} ns", "0 ns", f"{2 * part + last} ns"]  # a nanosecond per byte
    assert [what for _, what, _ in made] == [
        "copy tensor",
        "pace",
        "meet and sum",
        "pace",
        "pace",
        "await and gather",
        "pace",
    ]
    assert [rest for _, what, rest in made if what == "pace"] == paces
