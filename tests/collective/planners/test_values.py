"""Plans that really run, on Python numbers, give every rank the right values, bit for bit."""

import itertools

import pytest

from symm_overlap.collective.planners import (
    all_gather_consume,
    gather_then_consume,
    one_shot_all_reduce,
    produce_reduce_scatter,
    produce_then_reduce_scatter,
)
from symm_overlap.plan import plan_calls
from tests.quick import one_in

from .cases import OVERLAPPED, SEQUENTIAL, STREAMS, TWO, case_id
from .world import World


def expected(planner, inputs, chunks=1, **kw):
    """Compute, from all ranks' inputs of one call, what each rank's join reads. Sums are in rank order."""
    world = len(inputs)
    if "gather" in planner.__name__:
        gathered = list(itertools.chain(*inputs))
        if kw.get("accumulate"):
            results = []
            for rank in range(world):
                own_first = [*range(rank, world), *range(rank)]  # the order in which chunks are consumed
                total = 3 * inputs[rank][0]
                for value in [value for owner in own_first for value in inputs[owner]][1:]:
                    total = 3 * value + total
                results.append([[total]])
        else:
            results = [[[3 * value for value in gathered]] for _ in range(world)]
        if not kw.get("consume", True):
            results = [[] for _ in range(world)]
        return [result + [gathered] * kw.get("keep", False) for result in results]
    sums = []
    for unit in range(len(inputs[0])):
        total = 0.0
        for rank in range(world):
            total += 3 * inputs[rank][unit]
        sums.append(total)
    if "all_reduce" in planner.__name__:
        return [[sums] for _ in range(world)]
    kept = [[[3 * value for value in mine]] * kw.get("keep", False) for mine in inputs]
    return [[sums[rank * chunks : (rank + 1) * chunks], *kept[rank]] for rank in range(world)]


def check_values(planner, world, chunks, calls=3, threads=False, seed=None, **kw):
    whole = "gather" in planner.__name__ or planner is one_shot_all_reduce  # the input is not split by rank
    units = chunks if whole else world * chunks
    # Thirds of very different sizes: adding them in another order gives other bits.
    inputs = [
        [[(1 + 7 * rank + 3 * unit + call) / 3 * 10.0**rank for unit in range(units)] for rank in range(world)]
        for call in range(calls)
    ]
    if planner in OVERLAPPED:
        kw["chunks"] = chunks
    plans = plan_calls(planner, world, calls, **kw)
    results = World(world).run(plans, inputs, threads=threads, seed=seed)
    for call in range(calls):
        assert results[call] == expected(planner, inputs[call], **kw)


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", OVERLAPPED)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_rank_gets_the_right_values_in_three_calls(planner, world, chunks, streams):
    check_values(planner, world, chunks, threads=len(streams) > 1, **streams)


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize(
    "options",
    [
        {"keep": True},
        {"keep": True, "consume": False},
        {"accumulate": True},
        {"accumulate": True, "keep": True},
        {"symmetric": True},
        {"symmetric": True, "keep": True},
        {"symmetric": True, "accumulate": True},
        {"outbound": "compute0"},
        {"outbound": "compute0", "symmetric": True, "announce_offset": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize(("world", "chunks"), [(1, 2), (2, 1), (4, 2)])
def test_all_gather_options_give_the_right_values(options, streams, world, chunks):
    check_values(all_gather_consume, world, chunks, threads=len(streams) > 1, **streams, **options)


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("world", "chunks"), [(1, 2), (2, 1), (3, 3), (4, 2)])
def test_a_reduce_scatter_that_keeps_what_it_sums_gives_the_right_values(streams, world, chunks, own):
    check_values(produce_reduce_scatter, world, chunks, threads=len(streams) > 1, keep=True, own=own, **streams)


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        *((planner, {"in_place": in_place}) for planner in SEQUENTIAL for in_place in (False, True)),
        (gather_then_consume, {"keep": True}),
        (gather_then_consume, {"keep": True, "in_place": True}),
        (gather_then_consume, {"keep": True, "consume": False}),
        (gather_then_consume, {"symmetric": True}),
        (gather_then_consume, {"symmetric": True, "in_place": True}),
        (gather_then_consume, {"symmetric": True, "keep": True}),
        (produce_then_reduce_scatter, {"keep": True}),
        (produce_then_reduce_scatter, {"keep": True, "in_place": True}),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_sequential_plans_give_the_same_values(planner, arguments, world):
    check_values(planner, world, 1, **arguments)


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_one_thread_can_run_any_plan_in_its_order(planner, streams):
    check_values(planner, 4, 2, threads=False, **streams)


@pytest.mark.parametrize("seeds", one_in(2, [range(40), range(40, 100)]), ids=str)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_any_interleaving_gives_the_same_bits(planner, seeds):
    for seed in seeds:
        check_values(planner, 3, 1 + seed % 2, threads=True, seed=seed, copy="copy", compute=TWO)
