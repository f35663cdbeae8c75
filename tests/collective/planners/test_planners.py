"""What each planner promises: values, order of work, buffers. That plans are free of races is in test_verify."""

import itertools
import re

import pytest

from symm_overlap.plan import CHANNELS, all_gather_consume, produce_all_reduce, produce_reduce_scatter

from .world import World

TWO = ("compute0", "compute1")
REDUCERS = [produce_reduce_scatter, produce_all_reduce]
PLANNERS = [all_gather_consume, *REDUCERS]
STREAMS = [
    {"copy": "compute0"},
    {"copy": "compute0", "direct": True},
    {"copy": "copy"},
    {"copy": "copy", "compute": TWO},
    {"copy": "copy", "compute": TWO, "direct": True},
]


def streams_id(modes):
    return "-".join(f"{key}={len(value) if key == 'compute' else value}" for key, value in modes.items())


def expected(planner, inputs, chunks, **kw):
    """What the join of each rank reads, from all ranks' inputs of one call. Sums are in rank order, bit for bit."""
    world = len(inputs)
    if planner is all_gather_consume:
        gathered = list(itertools.chain(*inputs))
        if kw.get("accumulate"):
            results = []
            for rank in range(world):
                own_first = [*range(rank, world), *range(rank)]  # the order in which the chunks come
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
    for unit in range(world * chunks):
        total = 0.0
        for rank in range(world):
            total += 3 * inputs[rank][unit]
        sums.append(total)
    if planner is produce_all_reduce:
        return [[sums] for _ in range(world)]
    return [[sums[rank * chunks : (rank + 1) * chunks]] for rank in range(world)]


def check_values(planner, world, chunks, calls=3, threads=False, seed=None, **kw):
    units = chunks if planner is all_gather_consume else world * chunks
    # Thirds of odd size and different scale: adding them in another order gives other bits.
    inputs = [
        [[(1 + 7 * rank + 3 * unit + call) / 3 * 10.0**rank for unit in range(units)] for rank in range(world)]
        for call in range(calls)
    ]
    plans = [
        [planner(rank, world, chunks=chunks, parity=call % 2, **kw) for rank in range(world)] for call in range(calls)
    ]
    results = World(world).run(plans, inputs, threads=threads, seed=seed)
    for call in range(calls):
        assert results[call] == expected(planner, inputs[call], chunks, **kw)


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_rank_gets_the_right_values_in_three_calls(planner, world, chunks, streams):
    check_values(planner, world, chunks, threads=len(streams) > 1, **streams)


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
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
        {"outbound": "compute0", "symmetric": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_all_gather_options_give_the_right_values(options, streams):
    for world, chunks in [(1, 2), (2, 1), (4, 2)]:
        check_values(all_gather_consume, world, chunks, threads=len(streams) > 1, **streams, **options)


@pytest.mark.parametrize("options", [{}, {"symmetric": True}], ids=lambda options: "-".join(options) or "published")
@pytest.mark.parametrize("streams", [{"copy": "compute0"}, {"copy": "copy", "compute": TWO}], ids=streams_id)
def test_shards_can_be_consumed_at_once_where_they_lie(options, streams):
    arguments = {**streams, **options, "at_once": True, "direct": True}
    for world in (1, 2, 4):
        check_values(all_gather_consume, world, 1, threads=len(streams) > 1, **arguments)
        plan = all_gather_consume(0, world, **arguments)
        (step,) = (step for step in plan.steps if step.kind == "consume")
        assert [region.rank for region in step.reads] == list(range(world))
        assert "gathered" not in plan.extents


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_thread_can_run_any_plan_in_its_order(planner):
    for streams in STREAMS:
        check_values(planner, 4, 2, threads=False, **streams)


@pytest.mark.parametrize("planner", PLANNERS)
def test_any_interleaving_gives_the_same_bits(planner):
    for seed in range(200):
        check_values(planner, 3, 1 + seed % 2, threads=True, seed=seed, copy="copy", compute=TWO)


def kinds(plan, stream, kind):
    return [step for step in plan.steps if step.stream == stream and step.kind == kind]


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
def test_all_gather_consumes_its_own_shard_in_place_first_and_then_its_next_neighbours(streams):
    """R4 and R7."""
    for rank in range(4):
        plan = all_gather_consume(rank, 4, chunks=2, **streams)
        consumed = [step for step in plan.steps if step.kind == "consume"]
        assert [step.chunk for step in consumed] == [((rank + j) % 4, piece) for j in range(4) for piece in range(2)]
        assert all(step.reads[0].buffer == "input" for step in consumed[:2])
        assert not any(region.buffer == "input" for step in consumed[2:] for region in step.reads)
        writes = [region for step in plan.steps for region in step.writes if region.buffer == "gathered"]
        assert len(writes) == (0 if streams.get("direct") else 6), (
            "the own shard is copied only for a caller who wants it"
        )


@pytest.mark.parametrize(("planner", "label"), [(all_gather_consume, "[ready]"), (produce_all_reduce, "[reduced]")])
def test_the_rank_that_fetches_first_is_told_first(planner, label):
    """R4: rank r starts with r+1, so r+1 tells r first."""
    for rank in range(4):
        signals = [step.peer for step in planner(rank, 4).steps if step.kind == "signal" and step.label == label]
        assert signals == [(rank - j) % 4 for j in (1, 2, 3)]
        waits = [step.peer for step in planner(rank, 4).steps if step.kind == "wait" and step.label == label]
        assert waits == [(rank + j) % 4 for j in (1, 2, 3)]


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
@pytest.mark.parametrize("planner", REDUCERS)
def test_reduce_scatter_produces_for_its_next_neighbour_first_and_for_itself_last(planner, streams):
    """R4."""
    for rank in range(4):
        plan = planner(rank, 4, chunks=2, **streams)
        produced = [step.chunk for step in plan.steps if step.kind == "produce"]
        assert produced == [((rank + j) % 4, piece) for j in (1, 2, 3, 4) for piece in range(2)]


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
@pytest.mark.parametrize("planner", REDUCERS)
def test_sums_are_in_rank_order_on_every_rank(planner, streams):
    """R8."""
    for rank in range(5):
        for step in planner(rank, 5, chunks=2, **streams).steps:
            if step.kind == "reduce":
                sources = [region.start // 2 if region.buffer == "stage" else region.rank for region in step.reads]
                assert sources == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
@pytest.mark.parametrize("planner", PLANNERS)
def test_no_wait_stands_ahead_of_work_that_needs_no_peer(planner, streams):
    """R3: on a stream that computes, what needs nobody comes first."""
    for rank in range(3):
        plan = planner(rank, 3, chunks=3, **streams)
        for name in plan.streams:
            steps = [step for step in plan.steps if step.stream == name]
            waiting = False
            for step in steps:
                waiting = (
                    waiting or step.kind == "wait" or any(plan.steps[earlier].kind == "pull" for earlier in step.after)
                )
                needs_nobody = step.kind in ("produce", "publish") or (step.kind == "consume" and step.chunk[0] == rank)
                assert not (waiting and needs_nobody), f"{step} of rank {rank} stands behind a wait"


def test_the_copy_stream_is_enqueued_ahead_of_the_matmuls_it_feeds():
    """R2."""
    plan = all_gather_consume(0, 4, chunks=2, compute=TWO)
    order = [step.kind for step in plan.steps]
    assert max(i for i, kind in enumerate(order) if kind == "pull") < order.index("consume")


@pytest.mark.parametrize("planner", REDUCERS)
def test_two_compute_streams_take_turns_and_the_first_sleeps_before_it_starts(planner):
    plan = planner(1, 4, compute=TWO)
    produced = [step.stream for step in plan.steps if step.kind == "produce"]
    assert produced == ["compute1", "compute0", "compute1", "compute0"][: len(produced)]
    mine = [step.kind for step in plan.steps if step.stream == "compute0"]
    assert mine[:3] == ["fork", "sleep", "produce"]
    assert not kinds(planner(1, 4, compute=TWO, sleep=False), "compute0", "sleep")
    assert not kinds(planner(1, 4), "compute0", "sleep"), "one stream has nobody to let go first"


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_keep_to_their_channels_and_buffers(planner, streams):
    chunks, world = 2, 3
    sizes = {"input": 6, "workspace1": 6, "stage": 6, "reduced": 2, "output": 6}
    if planner is produce_reduce_scatter:
        sizes["output"] = 2
    if planner is all_gather_consume:
        sizes = {"input": 2, "workspace1": 2, "gathered": 6, "output": 6}
    for rank in range(world):
        plan = planner(rank, world, chunks=chunks, parity=1, **streams)
        assert all(step.channel is None or 0 <= step.channel < CHANNELS for step in plan.steps)
        for buffer, units in plan.extents.items():
            assert units <= sizes[buffer], buffer


def test_planning_again_gives_the_same_object():
    assert all_gather_consume(1, 4, chunks=2) is all_gather_consume(1, 4, chunks=2)
    assert all_gather_consume(1, 4).program is all_gather_consume(1, 4).program
    assert hash(all_gather_consume(1, 4)) == hash(all_gather_consume.__wrapped__(1, 4))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 4}, "rank 4 of world size 4"),
        ({"rank": -1}, "rank -1"),
        ({"rank": 0, "chunks": 0}, "chunks is 0"),
        ({"rank": 0, "parity": 2}, "parity is 2"),
        ({"rank": 0, "compute": ()}, "compute is ()"),
        ({"rank": 0, "compute": ("a", "a")}, "two different"),
        ({"rank": 0, "compute": ("a", "b"), "copy": "b"}, "copy is 'b'"),
    ],
)
@pytest.mark.parametrize("planner", PLANNERS)
def test_arguments_out_of_range_are_named(planner, arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        planner(world=4, **arguments)


def test_a_stream_that_cannot_publish_is_refused():
    with pytest.raises(ValueError, match="outbound is 'compute1'"):
        all_gather_consume(0, 2, compute=TWO, outbound="compute1")


def test_an_all_gather_that_nobody_reads_is_refused():
    with pytest.raises(ValueError, match="set keep=True"):
        all_gather_consume(0, 2, consume=False)


@pytest.mark.parametrize("streams", STREAMS, ids=streams_id)
def test_what_is_for_all_ranks_can_be_produced_at_once(streams):
    for world in (1, 2, 4):
        check_values(produce_reduce_scatter, world, 1, threads=len(streams) > 1, at_once=True, **streams)
        plan = produce_reduce_scatter(0, world, at_once=True, **streams)
        assert sum(step.kind == "produce" for step in plan.steps) == 1
    with pytest.raises(ValueError, match="at_once produces parts whole, but chunks is 2"):
        produce_reduce_scatter(0, 2, chunks=2, at_once=True)


@pytest.mark.parametrize(
    "more", [{"direct": False}, {"keep": True}, {"accumulate": True}, {"chunks": 2}], ids=streams_id
)
def test_only_whole_shards_in_place_are_consumed_at_once(more):
    with pytest.raises(ValueError, match="at_once takes whole shards where they lie"):
        all_gather_consume(0, 2, at_once=True, **{"direct": True, **more})
