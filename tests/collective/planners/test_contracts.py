"""Plans that compute something else are rejected if their contract is given, though no two of their accesses race."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from symm_overlap.collective.planners import (
    ALL_GATHER,
    ALL_GATHER_MATMUL,
    ALL_GATHER_MATMUL_TOTAL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    all_gather_consume,
    produce_all_reduce,
    produce_reduce_scatter,
)
from symm_overlap.plan import Contract, Kind, Life, Plan, Region, Step, copied, plan_calls, register, verify

from .cases import OVERLAPPED, STREAMS, contracts_of
from .changes import OWN, changed, problem_of
from .test_values import expected
from .world import World


def test_a_sum_in_another_order_is_another_sum() -> None:
    (plans,) = plan_calls(produce_reduce_scatter, 3, 1)
    other = changed(plans, 1, lambda step: replace(step, reads=step.reads[::-1]) if step.kind == "reduce" else step)
    found = problem_of(other, MATMUL_REDUCE_SCATTER)
    assert "output@1[0] is sum(product(2, input@2[1] of call 0), " in found
    assert "but should be sum(product(0, input@0[1] of call 0), " in found
    assert "call 0, rank 1, step" in found


def test_a_sum_that_leaves_out_a_rank_is_wrong() -> None:
    (plans,) = plan_calls(produce_all_reduce, 3, 1, chunks=2)
    other = changed(plans, 0, lambda step: replace(step, reads=step.reads[:2]) if step.kind == "reduce" else step)
    found = problem_of(other, MATMUL_ALL_REDUCE)
    assert "[0] is sum(product(0, input@0[0] of call 0), product(1, input@1[0] of call 0)), but should be" in found


def test_a_step_of_another_kind_is_wrong() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1, keep=True)
    other = changed(plans, 0, lambda step: replace(step, kind="pull") if step.reads[:1] == (OWN,) else step)
    assert "output@0[0] is input@0[0] of call 0, but should be product(0, input" in problem_of(other, ALL_GATHER_MATMUL)


def test_an_output_begins_with_its_first_unit() -> None:
    (plans,) = plan_calls(produce_reduce_scatter, 2, 1)

    def later(region: Region) -> Region:
        moved = region._replace(start=region.start + 1, stop=region.stop + 1)
        return moved if region.buffer == "output" else region

    other = changed(
        plans, 0, lambda step: replace(step, reads=tuple(map(later, step.reads)), writes=tuple(map(later, step.writes)))
    )
    found = problem_of(other, MATMUL_REDUCE_SCATTER)
    assert "the join hands over output@0[1], but the op promises units 0 to 1 of 'output'" in found


@pytest.mark.parametrize("contract", [ALL_GATHER, ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE])
def test_a_plan_that_hands_over_nothing_keeps_no_promise(contract: Contract) -> None:
    fork, join = Step("fork", "a", writes=(OWN,)), Step("join", "a")
    found = problem_of([Plan("nothing", 0, 1, (fork, join), {"input": Life.INPUT})], contract)
    assert "the join does not hand over" in found


def test_an_input_that_ranks_cannot_share_is_named() -> None:
    (plans,) = plan_calls(produce_reduce_scatter, 2, 1)
    longer = Region("input", 0, 0, 3)
    other = changed(plans, 0, lambda step: replace(step, writes=(longer,)) if step.kind == "fork" else step)
    assert "the input has 3 units, which 2 ranks cannot share equally" in problem_of(other, MATMUL_REDUCE_SCATTER)


def test_regions_of_different_lengths_are_not_added() -> None:
    buffers = {"input": Life.INPUT, "output": Life.OUTPUT}
    fork, two = Region("input", 0, 0, 3), Region("input", 0, 1, 3)
    steps = (
        Step("fork", "a", writes=(fork,)),
        Step("reduce", "a", reads=(OWN, two), writes=(Region("output", 0, 0, 1),)),
        Step("join", "a", reads=(Region("output", 0, 0, 1),)),
    )
    found = problem_of([Plan("sum", 0, 1, steps, buffers)], MATMUL_ALL_REDUCE)
    assert "the regions that it adds have different lengths" in found


def test_the_text_of_a_huge_value_is_short() -> None:
    place = Region("stage", 0, 0, 1)
    chain = [Step("reduce", "a", reads=(place, place), writes=(place,)) for _ in range(500)]
    steps = (
        Step("fork", "a", writes=(OWN,)),
        Step("publish", "a", reads=(OWN,), writes=(place,)),
        *chain,
        Step("publish", "a", reads=(place,), writes=(Region("output", 0, 0, 1),)),
        Step("join", "a", reads=(Region("output", 0, 0, 1),)),
    )
    buffers = {"input": Life.INPUT, "stage": Life.SCRATCH, "output": Life.OUTPUT}
    found = problem_of([Plan("chain", 0, 1, steps, buffers)], MATMUL_ALL_REDUCE)
    assert "output@0[0] is sum(sum(sum(" in found
    assert len(found) < 600


def test_a_step_at_which_all_ranks_meet_is_run_once() -> None:
    meet = register(Kind("meet and double", "", "meet", "#000000", meets="everyone"))

    def plan(rank: int) -> Plan:
        own, out = Region("input", rank, 0, 1), Region("output", rank, 0, 1)
        steps = (
            Step("fork", "a", writes=(own,)),
            Step("publish", "a", reads=(own,), writes=(out,)),
            Step(meet.name, "a", reads=(out,), writes=(out,), channel=0),
            Step("join", "a", reads=(out,)),
        )
        return Plan("double", rank, 2, steps, {"input": Life.INPUT, "output": Life.OUTPUT})

    contract = Contract(
        ["output"],
        {"publish": copied, meet.name: lambda names, plan, step, read: [[names("double", read[0][0])]]},
        lambda names, plan, buffer, given: [names("double", given(plan.rank, 0))],
    )
    verify([[plan(0), plan(1)]] * 2, contracts=[contract] * 2).raise_for_problems()


def test_a_total_has_every_chunk_once_in_any_order() -> None:
    (plans,) = plan_calls(all_gather_consume, 3, 1, chunks=2, accumulate=True)
    assert verify([plans], contracts=[ALL_GATHER_MATMUL_TOTAL]).ok

    def twice(step: Step) -> Step:
        if step.kind != "consume" or step.chunk != (2, 1):
            return step
        return replace(step, reads=(plans[0].steps[0].writes[0]._replace(stop=1), *step.reads[1:]), chunk=(0, 0))

    assert "output@0[0] is total(" in problem_of(changed(plans, 0, twice), ALL_GATHER_MATMUL_TOTAL)


def test_the_join_hands_over_all_of_an_output() -> None:
    half = Region("output", 0, 0, 1)
    fork, join = Step("fork", "a", writes=(Region("input", 0, 0, 2),)), Step("join", "a", reads=(half,))
    copy = Step("publish", "a", reads=(OWN,), writes=(half,))
    plan = Plan("half", 0, 1, (fork, copy, join), {"input": Life.INPUT, "output": Life.OUTPUT})
    contract = Contract(["output"], {"publish": copied}, lambda names, plan, buffer, given: [given(0, 0), given(0, 1)])
    found = problem_of([plan], contract)
    assert "the join hands over output@0[0], but the op promises units 0 to 2 of 'output'" in found


def test_every_rank_hands_over_the_outputs_of_the_op_and_no_other_buffer() -> None:
    (plans,) = plan_calls(produce_reduce_scatter, 2, 1)

    def elsewhere(step: Step) -> Step:
        found = {name: tuple(in_workspace(region) for region in getattr(step, name)) for name in ("reads", "writes")}
        return replace(step, **found) if step.kind in ("reduce", "join") else step

    def in_workspace(region: Region) -> Region:
        return Region("workspace", region.rank, region.rank, region.rank + 1) if region.buffer == "output" else region

    other = changed(plans, 1, elsewhere)
    problems = [str(each) for each in verify([other], contracts=[MATMUL_REDUCE_SCATTER]).problems]
    assert "wrong value: the join does not hand over 'output', which is an output of the op" in problems[0]
    assert "the join hands over 'workspace', but the outputs of the op are output and product" in problems[1]


def test_contracts_that_do_not_fit_plans_are_named() -> None:
    calls = plan_calls(all_gather_consume, 2, 2)
    no_matmul = Contract((), {"publish": copied, "pull": copied}, ALL_GATHER_MATMUL.promises)
    assert "the contract does not say what a consume makes" in problem_of(calls[0], no_matmul)
    nothing = {**ALL_GATHER_MATMUL.makes, "consume": lambda names, plan, step, read: [[]]}
    assert "it makes 0 units for output@" in problem_of(calls[0], Contract((), nothing, ALL_GATHER_MATMUL.promises))
    two = {**ALL_GATHER_MATMUL.makes, "consume": lambda names, plan, step, read: [*read, *read]}
    assert "it makes 2 regions, but writes 1" in problem_of(calls[0], Contract((), two, ALL_GATHER_MATMUL.promises))
    with pytest.raises(ValueError, match="1 contracts for 2 calls: give one for each call"):
        verify(calls, contracts=[ALL_GATHER_MATMUL])
    with pytest.raises(TypeError, match="give a list with one for each call"):
        verify(calls, contracts=ALL_GATHER_MATMUL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"halves is \[0, 2\]: the workspace has the halves 0 and 1"):
        verify(calls, halves=[0, 2])


def test_a_copy_has_one_source() -> None:
    (plans,) = plan_calls(all_gather_consume, 2, 1)
    other = changed(plans, 0, lambda step: replace(step, reads=step.reads * 2) if step.kind == "publish" else step)
    assert "one source and one target, and this one has 2 and 1" in problem_of(other, ALL_GATHER_MATMUL)


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


@pytest.mark.parametrize("planner", OVERLAPPED)
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
