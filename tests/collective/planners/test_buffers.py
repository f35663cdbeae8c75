"""Plans use the right buffers and channels. The buffers have the right lifetimes and places in the workspace."""

from dataclasses import astuple, replace

import pytest

from symm_overlap.collective.planners import (
    all_gather_consume,
    gather_then_consume,
    produce_all_reduce,
    produce_reduce_scatter,
    produce_then_all_reduce,
    produce_then_reduce_scatter,
)
from symm_overlap.plan import Life, Region, layout

from .cases import OVERLAPPED, SEQUENTIAL, STREAMS, case_id

LIVES = {
    "input": Life.INPUT,
    "workspace": Life.CALL,
    "offset": Life.CALL,
    "stage": Life.SCRATCH,
    "gathered": Life.SCRATCH,
    "product": Life.OUTPUT,
    "output": Life.OUTPUT,
}


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_plans_keep_to_their_channels_and_buffers(planner, streams):
    sizes = {
        "all_gather_consume": {"input": 2, "workspace": 2, "gathered": 6, "output": 6},
        "produce_reduce_scatter": {"input": 6, "workspace": 6, "stage": 6, "output": 2},
        "produce_all_reduce": {"input": 6, "workspace": 6, "stage": 6, "output": 6},
    }[planner.__name__]
    for rank in range(3):
        plan = planner(rank, 3, chunks=2, **streams)
        assert plan.channels == len(streams.get("compute", "1")) + 2 * (planner is produce_all_reduce) or (
            planner is all_gather_consume and not streams.get("in_place") and plan.channels == 1
        ), "one channel per compute stream that waits, and for a second exchange as many more, from 2 on"
        for buffer, units in plan.extents.items():
            assert units <= sizes[buffer], buffer
        assert dict(plan.buffers) == {buffer: LIVES[buffer] for buffer in plan.buffers}
        assert plan.buffers.keys() == plan.extents.keys(), "a buffer that no step touches must not be declared"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("planner", SEQUENTIAL)
def test_sequential_plans_keep_to_their_channels_and_buffers(planner, in_place):
    sizes = {
        "gather_then_consume": {"input": 1, "workspace": 1, "gathered": 3, "output": 3},
        "produce_then_reduce_scatter": {"input": 3, "workspace": 3, "stage": 3, "output": 1},
        "produce_then_all_reduce": {"input": 3, "workspace": 3, "stage": 3, "output": 3},
        "one_shot_all_reduce": {"input": 1, "workspace": 1, "stage": 3, "output": 1},
    }[planner.__name__]
    for rank in range(3):
        plan = planner(rank, 3, in_place=in_place)
        assert plan.channels == (3 if planner is produce_then_all_reduce else 1)
        assert all(units <= sizes[buffer] for buffer, units in plan.extents.items())
        assert dict(plan.buffers) == {buffer: LIVES[buffer] for buffer in plan.buffers}
        assert plan.buffers.keys() == plan.extents.keys() == sizes.keys() - ({"gathered", "stage"} if in_place else {})
        assert plan.streams == ("compute0",)


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        *((each, {**streams, "chunks": chunks}) for each in OVERLAPPED for streams in STREAMS for chunks in (1, 3)),
        *((all_gather_consume, {**streams, "symmetric": True, "chunks": 2}) for streams in STREAMS),
        *((produce_reduce_scatter, {**streams, "keep": True, "own": True, "chunks": 2}) for streams in STREAMS),
        *((each, {"in_place": in_place}) for each in SEQUENTIAL for in_place in (False, True)),
        *((gather_then_consume, {"symmetric": True, "in_place": in_place}) for in_place in (False, True)),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("world", range(1, 10))
def test_layouts_and_channels_are_the_same_on_every_rank(planner, arguments, world):
    """Layouts must be equal, because a rank finds its peers' chunks with its own plan."""
    plans = [planner(rank, world, **arguments) for rank in range(world)]
    for sizes in ({"workspace": 1000, "reduced": 1000, "offset": 8}, {"workspace": 256, "reduced": 512, "offset": 8}):
        layouts = [layout(plan, sizes) for plan in plans]
        assert [astuple(one) for one in layouts] == [astuple(layouts[0])] * world
        for plan in plans:
            for step in plan.steps:
                for region in step.reads + step.writes:
                    if plan.buffers[region.buffer] is Life.CALL:
                        end = layouts[0].offset[region.buffer] + region.stop * layouts[0].stride[region.buffer]
                        assert end <= layouts[0].nbytes, "a peer's chunk too must be within the half"
    assert len({plan.channels for plan in plans}) == 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("planner", [all_gather_consume, gather_then_consume])
def test_the_gathered_tensor_is_an_output_only_for_a_caller_who_wants_it(planner, keep):
    plan = planner(0, 3, keep=keep)
    assert plan.buffers["gathered"] is (Life.OUTPUT if keep else Life.SCRATCH)
    in_place = planner(0, 3, keep=keep, in_place=True)
    assert ("gathered" in in_place.buffers) == keep


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
def test_whoever_produces_a_chunk_writes_it_to_the_product_that_is_kept(streams, own):
    """A kept product is written by the step that produces it, without further steps or synchronisation."""
    plan = produce_reduce_scatter(1, 3, chunks=2, keep=True, own=own, **streams)
    plain = produce_reduce_scatter(1, 3, chunks=2, **streams)
    assert dict(plan.buffers) == {**plain.buffers, "product": LIVES["product"]}
    for step, other in zip(plan.steps, plain.steps, strict=True):  # keeping the product adds no synchronisation
        expected = other
        if step.kind == "produce":
            (target,) = other.writes
            kept = target._replace(buffer="product")
            expected = replace(other, writes=(kept,) if own and step.chunk[0] == 1 else (target, kept))
        elif step.kind == "reduce" and own:
            reads = [
                each._replace(buffer="product") if (each.rank, each.buffer) == (1, "workspace") else each
                for each in other.reads
            ]
            expected = replace(other, reads=tuple(reads))
        elif step.kind == "join":
            expected = replace(other, reads=(*other.reads, Region("product", 1, 0, 6)))
        assert step == expected


@pytest.mark.parametrize("in_place", [False, True])
def test_everything_that_is_produced_at_once_is_written_to_the_product_too(in_place):
    plan = produce_then_reduce_scatter(1, 3, in_place=in_place, keep=True)
    (step,) = (step for step in plan.steps if step.kind == "produce")
    assert [str(region) for region in step.writes] == ["workspace@1[0:3]", "product@1[0:3]"]
    assert str(plan.steps[-1].reads[-1]) == "product@1[0:3]"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sequential_gather_consumes_every_shard_in_one_step(in_place):
    (step,) = (step for step in gather_then_consume(1, 3, in_place=in_place).steps if step.kind == "consume")
    assert step.chunk is None
    assert [str(region) for region in step.writes] == ["output@1[0:3]"]
    shards = ["workspace@0[0]", "input@1[0]", "workspace@2[0]"] if in_place else ["gathered@1[0:3]"]
    assert [str(region) for region in step.reads] == shards


@pytest.mark.parametrize("planner", [produce_then_reduce_scatter, produce_then_all_reduce])
def test_a_sequential_reduction_produces_for_every_rank_in_one_step_and_in_one_piece(planner):
    plan = planner(1, 3)
    (step,) = (step for step in plan.steps if step.kind == "produce")
    assert (step.chunk, [str(region) for region in step.reads + step.writes]) == (
        None,
        ["input@1[0:3]", "workspace@1[0:3]"],
    )
    assert layout(plan, {"workspace": 100, "reduced": 100}).stride["workspace"] == 100, "parts must form one matrix"


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
    """A plan reads peers' symmetric inputs in place, at the offsets that the peers have announced."""
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
            elif inputs:
                assert [(region.buffer, region.rank) for region in step.reads[:3]] == [
                    ("input", each) for each in range(3)
                ]
        assert plan.channels == 3, "0 and 1 signal that an input is ready, 2 that it has been read"


@pytest.mark.parametrize("planner", [all_gather_consume, gather_then_consume])
def test_inputs_that_lie_at_one_place_on_all_ranks_share_nothing_else(planner):
    """If symmetric inputs have the same offset on all ranks, nothing is announced and no workspace is used."""
    plan = planner(1, 3, symmetric=True, announce_offset=False)
    assert "announce" not in plan.kinds
    assert set(plan.buffers) == {"input", "gathered", "output"}
    assert layout(plan, {}).nbytes == 0


@pytest.mark.parametrize("planner", [all_gather_consume, gather_then_consume])
def test_one_rank_alone_announces_nothing(planner):
    assert {"announce", "signal"}.isdisjoint(planner(0, 1, symmetric=True).kinds)
