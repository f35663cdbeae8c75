"""What the plans of each planner promise: order of work, channels, buffers. See also test_values and
test_synchronisation.
"""

import re

import pytest

from symm_overlap.collective.planners import all_gather_consume, gather_then_consume, produce_all_reduce
from symm_overlap.plan import Life, layout

from .cases import OVERLAPPED, REDUCERS, SEQUENTIAL, STREAMS, TWO, case_id


def kinds(plan, stream, kind):
    return [step for step in plan.steps if step.stream == stream and step.kind == kind]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
def test_all_gather_consumes_its_own_shard_in_place_first_and_then_its_next_neighbours(streams):
    """R4 and R7."""
    for rank in range(4):
        plan = all_gather_consume(rank, 4, chunks=2, **streams)
        consumed = [step for step in plan.steps if step.kind == "consume"]
        assert [step.chunk for step in consumed] == [((rank + j) % 4, piece) for j in range(4) for piece in range(2)]
        assert all(step.reads[0].buffer == "input" for step in consumed[:2])
        assert not any(region.buffer == "input" for step in consumed[2:] for region in step.reads)
        writes = [region for step in plan.steps for region in step.writes if region.buffer == "gathered"]
        assert len(writes) == (0 if streams.get("in_place") else 6), (
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


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", REDUCERS)
def test_reduce_scatter_produces_for_its_next_neighbour_first_and_for_itself_last(planner, streams):
    """R4."""
    for rank in range(4):
        plan = planner(rank, 4, chunks=2, **streams)
        produced = [step.chunk for step in plan.steps if step.kind == "produce"]
        assert produced == [((rank + j) % 4, piece) for j in (1, 2, 3, 4) for piece in range(2)]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", REDUCERS)
def test_sums_are_in_rank_order_on_every_rank(planner, streams):
    """R8."""
    for rank in range(5):
        for step in planner(rank, 5, chunks=2, **streams).steps:
            if step.kind == "reduce":
                sources = [region.start // 2 if region.buffer == "stage" else region.rank for region in step.reads]
                assert sources == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", OVERLAPPED)
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


LIVES = {
    "input": Life.INPUT,
    "workspace": Life.CALL,
    "offset": Life.CALL,
    "reduced": Life.CALL,
    "stage": Life.SCRATCH,
    "gathered": Life.SCRATCH,
    "output": Life.OUTPUT,
}


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_plans_keep_to_their_channels_and_buffers(planner, streams):
    sizes = {
        "all_gather_consume": {"input": 2, "workspace": 2, "gathered": 6, "output": 6},
        "produce_reduce_scatter": {"input": 6, "workspace": 6, "stage": 6, "output": 2},
        "produce_all_reduce": {"input": 6, "workspace": 6, "stage": 6, "reduced": 2, "output": 6},
    }[planner.__name__]
    for rank in range(3):
        plan = planner(rank, 3, chunks=2, **streams)
        assert plan.channels == len(streams.get("compute", "1")) + 2 * (planner is produce_all_reduce) or (
            planner is all_gather_consume and not streams.get("in_place") and plan.channels == 1
        ), "one for each compute stream that waits, and as many again, from 2 on, for a second exchange"
        for buffer, units in plan.extents.items():
            assert units <= sizes[buffer], buffer
        assert dict(plan.buffers) == {buffer: LIVES[buffer] for buffer in plan.buffers}
        assert plan.buffers.keys() == plan.extents.keys(), "what no step touches is not declared"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("planner", SEQUENTIAL)
def test_sequential_plans_keep_to_their_channels_and_buffers(planner, in_place):
    sizes = {
        "gather_then_consume": {"input": 1, "workspace": 1, "gathered": 3, "output": 3},
        "produce_then_reduce_scatter": {"input": 3, "workspace": 3, "stage": 3, "output": 1},
        "produce_then_all_reduce": {"input": 3, "workspace": 3, "stage": 3, "reduced": 1, "output": 3},
    }[planner.__name__]
    for rank in range(3):
        plan = planner(rank, 3, in_place=in_place)
        assert plan.channels == (3 if "reduced" in sizes else 1)
        assert all(units <= sizes[buffer] for buffer, units in plan.extents.items())
        assert dict(plan.buffers) == {buffer: LIVES[buffer] for buffer in plan.buffers}
        assert plan.buffers.keys() == plan.extents.keys() == sizes.keys() - ({"gathered", "stage"} if in_place else {})
        assert plan.streams == ("compute0",)


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        *((each, {**streams, "chunks": chunks}) for each in OVERLAPPED for streams in STREAMS for chunks in (1, 3)),
        *((all_gather_consume, {**streams, "symmetric": True, "chunks": 2}) for streams in STREAMS),
        *((each, {"in_place": in_place}) for each in SEQUENTIAL for in_place in (False, True)),
        *((gather_then_consume, {"symmetric": True, "in_place": in_place}) for in_place in (False, True)),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("world", range(1, 10))
def test_layouts_and_channels_are_the_same_on_every_rank(planner, arguments, world):
    """Ranks find each other's chunks by their own plans."""
    plans = [planner(rank, world, **arguments) for rank in range(world)]
    for sizes in ({"workspace": 1000, "reduced": 1000, "offset": 8}, {"workspace": 256, "reduced": 512, "offset": 8}):
        layouts = [layout(plan, sizes) for plan in plans]
        assert layouts == [layouts[0]] * world
        for plan in plans:
            for step in plan.steps:
                for region in step.reads + step.writes:
                    if plan.buffers[region.buffer] is Life.CALL:
                        end = layouts[0].offset[region.buffer] + region.stop * layouts[0].stride[region.buffer]
                        assert end <= layouts[0].nbytes, "a peer's chunk too lies within the half"
    assert len({plan.channels for plan in plans}) == 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("planner", [all_gather_consume, gather_then_consume])
def test_the_gathered_tensor_is_an_output_only_for_a_caller_who_wants_it(planner, keep):
    plan = planner(0, 3, keep=keep)
    assert plan.buffers["gathered"] is (Life.OUTPUT if keep else Life.SCRATCH)
    in_place = planner(0, 3, keep=keep, in_place=True)
    assert ("gathered" in in_place.buffers) == keep


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sequential_gather_consumes_every_shard_in_one_step(in_place):
    (step,) = (step for step in gather_then_consume(1, 3, in_place=in_place).steps if step.kind == "consume")
    assert step.chunk is None
    assert [str(region) for region in step.writes] == ["output@1[0:3]"]
    shards = ["workspace@0[0]", "input@1[0]", "workspace@2[0]"] if in_place else ["gathered@1[0:3]"]
    assert [str(region) for region in step.reads] == shards


@pytest.mark.parametrize("planner", SEQUENTIAL[1:])
def test_a_sequential_reduction_produces_for_every_rank_in_one_step_and_in_one_piece(planner):
    plan = planner(1, 3)
    (step,) = (step for step in plan.steps if step.kind == "produce")
    assert (step.chunk, [str(region) for region in step.reads + step.writes]) == (
        None,
        ["input@1[0:3]", "workspace@1[0:3]"],
    )
    assert layout(plan, {"workspace": 100, "reduced": 100}).stride["workspace"] == 100, "parts are one matrix"


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        *((all_gather_consume, {**streams, "symmetric": True, "chunks": 2}) for streams in STREAMS),
        (gather_then_consume, {"symmetric": True}),
        (gather_then_consume, {"symmetric": True, "in_place": True}),
    ],
    ids=case_id,
)
def test_who_reads_a_peers_symmetric_input_reads_where_it_lies(planner, arguments):
    for rank in range(3):
        plan = planner(rank, 3, **arguments)
        assert "workspace" not in plan.buffers
        (announced,) = (step for step in plan.steps if step.kind == "announce")
        assert [str(region) for region in announced.writes] == [f"offset@{rank}[0]"]
        assert plan.steps.index(announced) < min(
            index for index, step in enumerate(plan.steps) if step.kind in ("signal", "pull", "consume")
        )
        for step in plan.steps:
            inputs = [region.rank for region in step.reads if region.buffer == "input" and region.rank != rank]
            offsets = [region.rank for region in step.reads if region.buffer == "offset"]
            assert inputs == offsets if step.chunk else sorted(inputs) == sorted(offsets)
            if inputs and step.chunk:
                assert [region.buffer for region in step.reads[:2]] == ["input", "offset"]


@pytest.mark.parametrize("planner", [all_gather_consume, gather_then_consume])
def test_one_rank_alone_announces_nothing(planner):
    assert {"announce", "signal"}.isdisjoint(planner(0, 1, symmetric=True).kinds)


def test_planning_again_gives_the_same_object():
    assert all_gather_consume(1, 4, chunks=2) is all_gather_consume(1, 4, chunks=2)
    assert all_gather_consume(1, 4).program is all_gather_consume(1, 4).program
    assert hash(all_gather_consume(1, 4)) == hash(all_gather_consume.__wrapped__(1, 4))
    assert gather_then_consume(1, 4) is gather_then_consume(1, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 4}, "rank 4 of world size 4"),
        ({"rank": -1}, "rank -1"),
        ({"rank": 0, "chunks": 0}, "chunks is 0"),
        ({"rank": 0, "compute": ()}, "compute is ()"),
        ({"rank": 0, "compute": ("a", "a")}, "two different"),
        ({"rank": 0, "compute": ("a", "b"), "copy": "b"}, "copy is 'b'"),
    ],
)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_arguments_out_of_range_are_named(planner, arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        planner(world=4, **arguments)


def test_a_stream_that_cannot_publish_is_refused():
    with pytest.raises(ValueError, match="outbound is 'compute1'"):
        all_gather_consume(0, 2, compute=TWO, outbound="compute1")


@pytest.mark.parametrize("planner", [all_gather_consume, gather_then_consume])
def test_an_all_gather_that_nobody_reads_is_refused(planner):
    with pytest.raises(ValueError, match="set keep=True"):
        planner(0, 2, consume=False)


@pytest.mark.parametrize("rank", [-1, 4])
@pytest.mark.parametrize("planner", SEQUENTIAL)
def test_a_rank_outside_the_world_is_named(planner, rank):
    with pytest.raises(ValueError, match=f"rank {rank} of world size 4"):
        planner(rank, 4)
