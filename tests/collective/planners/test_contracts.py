"""Plans that compute something else are rejected if their contract is given, though no two of their accesses race."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from symm_overlap.collective.planners import (
    ALL_GATHER,
    ALL_GATHER_TOTAL,
    ALL_REDUCE,
    REDUCE_SCATTER,
    all_gather_consume,
    produce_all_reduce,
    produce_reduce_scatter,
)
from symm_overlap.plan import Contract, Life, Plan, Region, Step, copied, plan_calls, verify

from .cases import OVERLAPPED, STREAMS, contracts_of
from .test_values import expected
from .world import World

PLANNERS: list[Callable[..., Plan]] = OVERLAPPED


def changed(plans: list[Plan], rank: int, changes: Callable[[Step], Step]) -> list[Plan]:
    """Return the plans with each step of one rank changed."""
    plan = plans[rank]
    steps = tuple(changes(step) for step in plan.steps)
    return [*plans[:rank], Plan(plan.op, rank, plan.world, steps, plan.buffers), *plans[rank + 1 :]]


def problem_of(plans: list[Plan], contract: Contract) -> str:
    """Return the first problem of two calls, which have none without a contract."""
    assert verify([plans] * 2).ok
    found = verify([plans] * 2, contracts=[contract] * 2).problems
    assert {problem.kind for problem in found} == {"wrong value"}
    return str(found[0])


def test_a_sum_in_another_order_is_another_sum() -> None:
    (plans,) = plan_calls(produce_reduce_scatter, 3, 1)
    other = changed(plans, 1, lambda step: replace(step, reads=step.reads[::-1]) if step.kind == "reduce" else step)
    found = problem_of(other, REDUCE_SCATTER)
    assert "output@1[0] is sum(product(2, input@2[1] of call 0), " in found
    assert "but should be sum(product(0, input@0[1] of call 0), " in found
    assert "call 0, rank 1, step" in found


def test_a_sum_that_leaves_out_a_rank_is_wrong() -> None:
    (plans,) = plan_calls(produce_all_reduce, 3, 1, chunks=2)
    other = changed(plans, 0, lambda step: replace(step, reads=step.reads[:2]) if step.kind == "reduce" else step)
    found = problem_of(other, ALL_REDUCE)
    assert "[0] is sum(product(0, input@0[0] of call 0), product(1, input@1[0] of call 0)), but should be" in found


def test_a_matmul_with_another_chunk_than_it_names_is_wrong() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1, compute=("one",), copy="one")
    other = changed(plans, 0, lambda step: replace(step, chunk=(0, 0)) if step.kind == "consume" else step)
    assert "it computes chunk 0.0, but reads input@1[0] of call 0" in problem_of(other, ALL_GATHER)
    (plans,) = plan_calls(produce_reduce_scatter, 2, 1)
    other = changed(plans, 1, lambda step: replace(step, chunk=(1, 0)) if step.kind == "produce" else step)
    assert "it computes chunk 1.0, but reads input@1[0] of call 0" in problem_of(other, REDUCE_SCATTER)


def test_a_step_of_another_kind_is_wrong() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1, keep=True)
    other = changed(plans, 0, lambda step: replace(step, kind="pull") if step.kind == "consume" else step)
    assert "output@0[0] is input@0[0] of call 0, but should be product(0, input" in problem_of(other, ALL_GATHER)


@pytest.mark.parametrize("offsets", ["none", "own", "first"])
def test_a_symmetric_input_is_read_where_its_rank_says_that_it_begins(offsets: str) -> None:
    (plans,) = plan_calls(all_gather_consume, 3, 1, symmetric=True)

    def wrong(step: Step) -> Step:
        if step.kind != "pull":
            return step
        shard, offset = step.reads
        return replace(
            step, reads={"none": (shard,), "own": (shard, offset._replace(rank=0)), "first": (offset,)}[offsets]
        )

    found = problem_of(changed(plans, 0, wrong), ALL_GATHER)
    assert "it must read where the input begins of each of the ranks" in found


def test_a_total_has_every_chunk_once_in_any_order() -> None:
    (plans,) = plan_calls(all_gather_consume, 3, 1, chunks=2, accumulate=True)
    assert verify([plans], contracts=[ALL_GATHER_TOTAL]).ok

    def twice(step: Step) -> Step:
        if step.kind != "consume" or step.chunk != (2, 1):
            return step
        return replace(step, reads=(plans[0].steps[0].writes[0]._replace(stop=1), *step.reads[1:]), chunk=(0, 0))

    assert "output@0[0] is total(" in problem_of(changed(plans, 0, twice), ALL_GATHER_TOTAL)


def test_the_join_hands_over_all_of_an_output() -> None:
    fork, join = (
        Step("fork", "a", writes=(Region("input", 0, 0, 2),)),
        Step("join", "a", reads=(Region("output", 0, 0, 1),)),
    )
    copy = Step("publish", "a", reads=(Region("input", 0, 0, 1),), writes=(Region("output", 0, 0, 1),))
    plan = Plan("half", 0, 1, (fork, copy, join), {"input": Life.INPUT, "output": Life.OUTPUT})
    contract = Contract({"publish": copied}, lambda names, plan, buffer, given: [given(0, 0), given(0, 1)])
    found = problem_of([plan], contract)
    assert "the join hands over output@0[0], but the op promises 2 units of 'output'" in found


def test_every_rank_hands_over_the_outputs_of_the_op_and_no_other_buffer() -> None:
    (plans,) = plan_calls(produce_reduce_scatter, 2, 1)

    def elsewhere(step: Step) -> Step:
        found = {name: tuple(in_workspace(region) for region in getattr(step, name)) for name in ("reads", "writes")}
        return replace(step, **found) if step.kind in ("reduce", "join") else step

    def in_workspace(region: Region) -> Region:
        return Region("workspace", region.rank, region.rank, region.rank + 1) if region.buffer == "output" else region

    other = changed(plans, 1, elsewhere)
    problems = [str(each) for each in verify([other], contracts=[REDUCE_SCATTER]).problems]
    assert "wrong value: the join hands over workspace, but on rank 0 output" in problems[0]
    assert "the join hands over 'workspace', but the outputs of the op are output and product" in problems[1]


def test_contracts_that_do_not_fit_plans_are_named() -> None:
    calls = plan_calls(all_gather_consume, 2, 2)
    no_matmul = Contract({"publish": copied, "pull": copied}, ALL_GATHER.promises)
    assert "the contract does not say what a consume makes" in problem_of(calls[0], no_matmul)
    nothing = {**ALL_GATHER.makes, "consume": lambda names, plan, step, read: [[]]}
    assert "it makes 0 units for output@" in problem_of(calls[0], Contract(nothing, ALL_GATHER.promises))
    two = {**ALL_GATHER.makes, "consume": lambda names, plan, step, read: [*read, *read]}
    assert "it makes 2 regions, but writes 1" in problem_of(calls[0], Contract(two, ALL_GATHER.promises))
    with pytest.raises(ValueError, match="1 contracts for 2 calls: give one for each call"):
        verify(calls, contracts=[ALL_GATHER])


def test_a_copy_has_one_source() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1)
    other = changed(plans, 0, lambda step: replace(step, reads=step.reads * 2) if step.kind == "publish" else step)
    assert "a copy reads one region, and this one reads 2" in problem_of(other, ALL_GATHER)


def mutants(rng: random.Random, planner: Callable[..., Plan], world: int, **options: Any) -> Iterator[list[Plan]]:
    """Yield plans in which some steps read or write other regions, or are of another kind."""
    plans = plan_calls(planner, world, 1, **options)[0]
    kinds = ("pull", "publish", "produce", "consume", "reduce")
    while True:
        found = plans
        for _ in range(rng.choice((1, 1, 2))):
            rank = rng.randrange(world)
            chosen = rng.choice([step for step in plans[rank].steps if step.kind in kinds])
            regions = [region for step in plans[rank].steps for region in step.reads + step.writes]
            what = rng.choice(("reads", "writes", "order", "kind"))
            if what == "order":
                other = replace(chosen, reads=tuple(rng.sample(chosen.reads, len(chosen.reads))))
            elif what == "kind":
                other = replace(chosen, kind=rng.choice(kinds))
            else:
                touched = list(getattr(chosen, what))
                touched[rng.randrange(len(touched))] = rng.choice(regions)
                other = replace(chosen, **{what: tuple(touched)})
            found = changed(found, rank, lambda step, chosen=chosen, other=other: other if step == chosen else step)  # type: ignore[misc]
        yield found


@pytest.mark.parametrize("planner", PLANNERS)
def test_changed_plans_are_accepted_only_if_they_compute_the_same_numbers(planner: Callable[..., Plan]) -> None:
    rng = random.Random(7)
    accepted = rejected = 0
    for options in (STREAMS[0], STREAMS[1], STREAMS[3]):
        source = mutants(rng, planner, 3, chunks=2, **options)
        for plans in (next(source) for _ in range(120)):
            calls = [plans] * 2
            if not verify(calls).ok:
                continue
            if not verify(calls, contracts=contracts_of(calls)).ok:
                rejected += 1
                continue
            accepted += 1
            units = plans[0].extents["input"]
            inputs = [
                [[(1 + 7 * rank + 3 * unit + call) / 3 * 10.0**rank for unit in range(units)] for rank in range(3)]
                for call in range(2)
            ]
            results = World(3).run(calls, inputs)
            for call in range(2):
                assert results[call] == expected(planner, inputs[call], chunks=2), plans
    assert accepted > 20
    assert rejected > 20
