"""Pictures of plans show every step, in the right place."""

import json

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.collective.planners.published import torch_matmul_reduce_scatter
from symm_overlap.plan import (
    Step,
    draw,
    plan_calls,
    simulate,
)

from .timelines import by_hand

TWO = ("compute0", "compute1")


def test_text_is_a_row_for_each_stream_and_a_column_for_each_step_of_the_way():
    assert draw.text(plan_calls(all_gather_consume, 2, 1)).splitlines() == [
        "rank 0  compute0 | fork  sleep         consume 0  consume 1  join",
        "rank 0  copy     |       publish 0 !1  ?1 pull 1",
        "",
        "rank 1  compute0 | fork  sleep         consume 1  consume 0  join",
        "rank 1  copy     |       publish 1 !0  ?0 pull 0",
    ]


def test_text_shows_pieces_where_there_are_several_and_one_rank_if_asked():
    calls = plan_calls(produce_reduce_scatter, 2, 1, chunks=2, copy="compute0", in_place=True)
    assert draw.text(calls, [1], width=90).splitlines() == [
        "rank 1  compute0 | fork  produce 0.0 !0  produce 0.1 !0  produce 1.0  produce 1.1",
        "",
        "",
        "rank 1  compute0 | ?0 reduce 1.0  ?0 reduce 1.1  join",
    ]


@pytest.mark.parametrize("planner", [all_gather_consume, produce_reduce_scatter, produce_all_reduce])
@pytest.mark.parametrize("width", [60, 120, 1000])
def test_text_fits_its_width_and_leaves_nothing_out(planner, width):
    calls = plan_calls(planner, 4, 1, chunks=2, compute=TWO)
    picture = draw.text(calls, width=width)
    assert max(map(len, picture.splitlines())) <= width
    steps = [step for plan in calls[0] for step in plan.steps]
    for kind in {step.kind for step in steps} - {"signal", "wait"}:
        assert picture.count(kind) == sum(step.kind == kind for step in steps)
    words = picture.split()
    for mark, kind in (("!", "signal"), ("?", "wait")):
        peers = [peer for word in words if word[0] == mark for peer in word[1:].split(",")]
        assert len(peers) == sum(len(step.peers) for step in steps if step.kind == kind)


def test_text_puts_what_follows_into_a_later_column():
    """A step is in a later column than every step that it follows, also on other streams and ranks."""
    picture = draw.text(plan_calls(produce_all_reduce, 4, 1, compute=TWO), width=1000)
    rows = {tuple(line.split("|")[0].split()[1:]): line for line in picture.splitlines() if line}
    for rank in range(4):
        neighbour = (rank - 1) % 4
        produced = rows[str(neighbour), "compute1"].index(f"produce {rank} !{rank}")
        pulled = rows[str(rank), "copy"].index(f"?{neighbour} pull {neighbour}")
        last_pulled = rows[str(rank), "copy"].index(f"pull {(rank + 1) % 4}")
        reduced = rows[str(rank), "compute0"].index(f"reduce {rank} !")
        peers = ",".join(str((rank + step) % 4) for step in (1, 2, 3))
        summed = rows[str(rank), "copy"].index(f"?{peers} pull {(rank + 1) % 4}")
        assert produced < pulled < last_pulled < reduced < summed


def test_text_keeps_a_signal_apart_from_the_step_before_it_when_it_also_follows_another_stream():
    first = (
        Step("fork", "s"),
        Step("consume", "s", chunk=(0, 0)),
        Step("pull", "t", chunk=(0, 0), after=(1,)),
        Step("signal", "s", peers=(1,), channel=0, after=(2,)),
        Step("join", "s"),
    )
    second = (Step("fork", "s"), Step("wait", "s", peers=(0,), channel=0), Step("join", "s"))
    lines = draw.text([[by_hand(0, 2, *first), by_hand(1, 2, *second)]]).splitlines()
    assert lines[0] == "rank 0  s | fork  consume 0          !1  join"
    assert lines[1] == "rank 0  t |                  pull 0"


def test_text_shows_ranks_side_by_side_in_a_barrier():
    lines = draw.text(plan_calls(torch_matmul_reduce_scatter, 3, 1), width=1000).splitlines()
    columns = {line.index("barrier [all read]") for line in lines if "barrier [all read]" in line}
    assert len(columns) == 1


def test_text_refuses_what_has_no_picture():
    with pytest.raises(ValueError, match="no rank 2 in a plan for ranks 0 to 1"):
        draw.text(plan_calls(all_gather_consume, 2, 1), [2])
    wait = Step("wait", "s", peers=(1,), channel=0)
    with pytest.raises(ValueError, match="deadlock"):
        draw.text([[by_hand(0, 2, wait), by_hand(1, 2)]])
    with pytest.raises(ValueError, match="there are no plans to draw"):
        draw.text([])


@pytest.fixture(scope="module")
def timeline():
    return simulate(plan_calls(produce_reduce_scatter, 3, 1, chunks=2, compute=TWO))


def test_trace_has_a_slice_for_each_step_and_an_arrow_for_each_signal(timeline):
    trace = json.loads(json.dumps(draw.trace(timeline)))
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.makespan * 1000)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert sorted(threads.values()) == sorted(["compute0", "compute1", "copy"] * 3)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    for event in slices:
        assert (event["pid"], event["tid"]) in threads
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == len(timeline.signals)
    for number, start in starts.items():
        assert start["ts"] < ends[number]["ts"]
        assert start["pid"] != ends[number]["pid"]


def test_an_arrow_joins_a_wait_to_the_signal_it_waits_for(timeline):
    for signal, wait in timeline.signals:
        assert (signal.at.step.peer, wait.at.step.peer) == (wait.at.rank, signal.at.rank)
        assert signal.at.step.label == wait.at.step.label
        assert signal.end <= wait.end
        assert signal.at.step.chunk == (wait.at.rank, wait.at.step.chunk[1])
