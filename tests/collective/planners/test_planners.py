"""Properties of the plans of each planner, above all the order of work. Others: test_values, test_synchronisation,
test_buffers.
"""

import re

import pytest

from symm_overlap.collective.planners import all_gather_consume, gather_then_consume, produce_all_reduce

from .cases import OVERLAPPED, REDUCERS, SEQUENTIAL, STREAMS, TWO, case_id


def kinds(plan, stream, kind):
    return [step for step in plan.steps if step.stream == stream and step.kind == kind]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
def test_all_gather_consumes_its_own_shard_in_place_first_and_then_its_next_neighbours(streams):
    """A rank computes with local data while its neighbour's arrives. No two ranks fetch from one rank at a time."""
    for rank in range(4):
        plan = all_gather_consume(rank, 4, chunks=2, **streams)
        consumed = [step for step in plan.steps if step.kind == "consume"]
        assert [step.chunk for step in consumed] == [((rank + j) % 4, piece) for j in range(4) for piece in range(2)]
        assert all(step.reads[0].buffer == "input" for step in consumed[:2])
        assert not any(region.buffer == "input" for step in consumed[2:] for region in step.reads)
        writes = [region for step in plan.steps for region in step.writes if region.buffer == "gathered"]
        assert len(writes) == (0 if streams.get("in_place") else 6), (
            "the local shard is copied only if the caller wants the gathered tensor"
        )


@pytest.mark.parametrize(("planner", "label"), [(all_gather_consume, "[ready]"), (produce_all_reduce, "[reduced]")])
def test_the_rank_that_fetches_first_is_told_first(planner, label):
    """Rank r fetches from r+1 first, so r+1 signals r first."""
    for rank in range(4):
        signals = [
            peer
            for step in planner(rank, 4).steps
            if (step.kind, step.label) == ("signal", label)
            for peer in step.peers
        ]
        assert signals == [(rank - j) % 4 for j in (1, 2, 3)]
        waits = [
            peer for step in planner(rank, 4).steps if (step.kind, step.label) == ("wait", label) for peer in step.peers
        ]
        assert waits == [(rank + j) % 4 for j in (1, 2, 3)]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", REDUCERS)
def test_reduce_scatter_produces_for_its_next_neighbour_first_and_for_itself_last(planner, streams):
    """Every chunk except the rank's own then travels while a matmul runs."""
    for rank in range(4):
        plan = planner(rank, 4, chunks=2, **streams)
        produced = [step.chunk for step in plan.steps if step.kind == "produce"]
        assert produced == [((rank + j) % 4, piece) for j in (1, 2, 3, 4) for piece in range(2)]


@pytest.mark.parametrize(
    ("planner", "arguments"),
    [
        *((each, {**streams, "chunks": 2}) for each in REDUCERS for streams in STREAMS),
        *((each, {"in_place": in_place}) for each in SEQUENTIAL[1:] for in_place in (False, True)),
    ],
    ids=case_id,
)
def test_partial_sums_are_awaited_in_the_order_in_which_peers_compute_them(planner, arguments):
    """While rank r computes for r+1, r-1 computes for r. So partial sums arrive from r-1 first, then from r-2."""
    for rank in range(4):
        waits = [step for step in planner(rank, 4, **arguments).steps if step.label == "[partial]"]
        waits = [step for step in waits if step.kind == "wait"]
        for piece in range(arguments.get("chunks", 1)):
            peers = [peer for step in waits if step.chunk[1] == piece for peer in step.peers]
            if arguments.get("in_place") and "compute" in arguments:  # the waits of one stream come first
                peers = sorted(peers, key=lambda peer: (rank - peer) % 4)
            assert peers == [(rank - j) % 4 for j in (1, 2, 3)]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", REDUCERS)
def test_sums_are_in_rank_order_on_every_rank(planner, streams):
    """A fixed order of the sum gives the same bits in every run."""
    for rank in range(5):
        for step in planner(rank, 5, chunks=2, **streams).steps:
            if step.kind == "reduce":
                sources = [region.start // 2 if region.buffer == "stage" else region.rank for region in step.reads]
                assert sources == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("streams", STREAMS, ids=case_id)
@pytest.mark.parametrize("planner", OVERLAPPED)
def test_no_wait_stands_ahead_of_work_that_needs_no_peer(planner, streams):
    """On every stream, work that needs no peer comes before all waits for peers."""
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
                assert not (waiting and needs_nobody), f"{step} of rank {rank} comes after a wait"


@pytest.mark.parametrize("arguments", [{}, {"keep": True}, {"symmetric": True}], ids=case_id)
def test_a_sequential_gather_copies_its_own_shard_before_it_waits(arguments):
    """The copy of the local shard needs no peer, so it does not wait for one."""
    order = [(step.kind, step.chunk) for step in gather_then_consume(1, 3, **arguments).steps]
    assert order.index(("pull", (1, 0))) < min(index for index, (kind, _) in enumerate(order) if kind == "wait")


@pytest.mark.parametrize(("chunks", "asleep"), [(1, ["compute0"]), (2, ["compute0", "compute1"])])
def test_the_streams_that_hold_the_own_shard_sleep_while_it_is_published(chunks, asleep):
    """The streams that consume the local shard sleep first, so that publishing comes before their matmuls."""
    plan = all_gather_consume(1, 3, chunks=chunks, compute=TWO)
    assert [step.stream for step in plan.steps if step.kind == "sleep"] == asleep
    assert "sleep" not in all_gather_consume(0, 1, chunks=chunks, compute=TWO).kinds, "one rank publishes nothing"


def test_a_symmetric_input_that_is_read_in_place_needs_no_copy_stream():
    assert all_gather_consume(1, 3, compute=TWO, symmetric=True, in_place=True).streams == TWO


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_own_matmuls_are_issued_behind_the_signals_and_each_copy_one_chunk_ahead(world, chunks, keep):
    """A copy is issued before the matmul that precedes the one that needs it, and no copy is issued earlier.

    One host thread issues the whole plan. With eight ranks, the first matmul would otherwise come after forty steps.
    """
    plan = all_gather_consume(0, world, chunks=chunks, compute=TWO, outbound="compute0", keep=keep)
    order = [(step.kind, step.chunk) for step in plan.steps if step.kind not in ("fork", "join")]
    own = [(0, piece) for piece in range(chunks)]
    peers = [(owner, piece) for owner in range(1, world) for piece in range(chunks)]
    expected = [(kind, chunk) for chunk in own for kind in ("publish", "signal")]
    expected += [("consume", chunk) for chunk in own]
    fetched = [[(kind, chunk) for kind in ("wait", "pull")] for chunk in peers]
    expected += fetched[0]
    for chunk, fetch in zip(peers, [*fetched[1:], []], strict=True):
        expected += [*fetch, ("consume", chunk)]
    assert order == expected + [("pull", chunk) for chunk in own if keep]


@pytest.mark.parametrize("planner", REDUCERS)
def test_two_compute_streams_take_turns_and_the_first_sleeps_before_it_starts(planner):
    plan = planner(1, 4, compute=TWO)
    produced = [step.stream for step in plan.steps if step.kind == "produce"]
    assert produced == ["compute1", "compute0", "compute1", "compute0"][: len(produced)]
    mine = [step.kind for step in plan.steps if step.stream == "compute0"]
    assert mine[:3] == ["fork", "sleep", "produce"]
    assert not kinds(planner(1, 4, compute=TWO, sleep=False), "compute0", "sleep")
    assert not kinds(planner(1, 4), "compute0", "sleep"), "with one stream, there is no other to go first"


def test_planning_again_gives_the_same_object():
    """Plans are cached: equal arguments return the same plan."""
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
        ({"rank": 0, "copies": 3}, "copies is 3"),
        ({"rank": 0, "compute": ("copy1",), "copies": 2}, "copy1 is the name of"),
        ({"rank": 0, "compute": ("a",), "copy": "a", "copies": 2}, "copies is 2"),
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
