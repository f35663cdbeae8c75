"""Both readers find the same in traces of the same program: activities, their steps, and their calls."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from symm_overlap.collective.choosing.plans import planned
from symm_overlap.collective.choosing.prediction import predict
from symm_overlap.plan import Step
from symm_overlap.plan.ranges import range_of
from symm_overlap.profile import Recording, exposure, kinds_of_calls, read
from symm_overlap.profile.compare import compare, measured_timeline
from symm_overlap.profile.torch_trace import from_torch_trace
from symm_overlap.runtime import TRAITS, Device, costs_of
from tests.profile.traces import CHOICE, PROBLEM, Ran, Ranged, chrome, nsight, program, require_sound, write_chrome


def one(path: Path) -> Recording:
    (recording,) = read(path)
    return recording


@pytest.fixture(params=["torch", "nsight"])
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    path = tmp_path / "trace"
    (write_chrome if request.param == "torch" else nsight)(path, *program())
    return one(path)


def test_activities_have_the_steps_and_calls_that_launched_them(recording: Recording) -> None:
    ran, _ = program()
    assert (recording.device, len(recording.calls)) == ("NVIDIA H100 80GB HBM3", 2)
    assert len(recording.activities) == len(ran)
    assert not recording.on_cpu
    for call, activities in enumerate(recording.activities_of_calls):
        assert {each.calls for each in activities} == {(call,)}
        kinds = [each.step.kind for each in sorted(activities, key=lambda each: each.start) if each.step is not None]
        assert sorted(kinds) == sorted(["publish", "signal", *["consume"] * 4, *["pull"] * 3])
    of_model = [each for each in recording.activities if not each.calls]
    assert [(each.name, each.role) for each in of_model] == [
        ("gemm of the model", "compute"),
        ("ncclDevKernel_AllReduce", "collective"),
    ] * 2
    what = recording.calls[0].what
    assert what is not None
    problem, choice = what
    assert (problem.op, problem.m, problem.n, problem.k, problem.world, problem.dtype) == (
        *(PROBLEM.op, PROBLEM.m, PROBLEM.n, PROBLEM.k, PROBLEM.world, PROBLEM.dtype),
    )
    assert (choice.path, choice.compute, choice.copy, choice.chunks) == (
        *(CHOICE.path, CHOICE.compute),
        "copy",
        1,
    )


def test_the_roles_of_steps_count(recording: Recording) -> None:
    (kind,) = kinds_of_calls(recording)
    assert kind.count == 2
    ran, _ = program(1)
    for name, found in (("gemm", kind.median.compute), ("Memcpy DtoD", kind.median.moving)):
        spans = [(int(each.start), int(each.end)) for each in ran if each.name == name]
        assert len(spans) == 4  # of the ranks, and publish and three pulls
        assert found == pytest.approx(len({moment for span in spans for moment in range(*span)}) / 1000)
    assert kind.median.host == pytest.approx(0.09)


def test_steps_are_compared_with_the_prediction_for_the_ranks_own_place_in_the_ring(recording: Recording) -> None:
    module = sys.modules[compare.__module__]  # the package has a function of this name
    with mock.patch.object(module, "planned", wraps=planned) as made:
        compared = compare(recording, 0)
    assert made.call_args.args[2] == 2, "ranks whose matmuls span several parts may have other matmuls than rank 0"
    assert compared is not None
    assert compared.model == "H100"
    consumed = [each for each in compared.steps if each.name.startswith("consume")]
    assert [each.name.split(" on ")[0] for each in consumed] == [
        "consume 2.0",
        "consume 3.0",
        "consume 0.0",
        "consume 1.0",
    ]
    predicted = [each.predicted for each in consumed]
    assert all(span is not None for span in predicted)
    assert predicted == sorted(predicted, key=lambda span: span or (0, 0)), "the own chunk comes first"
    timeline = measured_timeline(recording, 0, "measured")
    assert timeline is not None
    assert [event.at.rank for event in timeline.events] == [2] * 9
    assert timeline.makespan == pytest.approx(max(each.measured[1] for each in compared.steps))


def test_two_processes_in_one_database_are_two_recordings(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    nsight(first, *program(), pid=11)
    ran, ranges = program(3)
    nsight(second, ran, [each._replace(name=each.name.replace("rank=2 ", "rank=1 ")) for each in ranges], pid=12)
    with closing(sqlite3.connect(first)) as database:
        database.execute("ATTACH ? AS other", (str(second),))
        database.execute(
            "UPDATE other.NVTX_EVENTS SET text = (SELECT value FROM other.StringIds WHERE id = textId) "
            "WHERE text IS NULL"
        )
        database.execute("UPDATE other.NVTX_EVENTS SET textId = NULL")
        for table in ("NVTX_EVENTS", *(f"CUPTI_ACTIVITY_KIND_{name}" for name in ("RUNTIME", "KERNEL", "MEMCPY"))):
            database.execute(f"INSERT INTO main.{table} SELECT * FROM other.{table}")
        database.commit()
    assert [(each.process, len(each.calls)) for each in read(first)] == [(11, 2), (12, 3)]


def test_copies_and_fills_of_nsight_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    nsight(path, *program(1))
    before = {each.name for each in one(path).activities}
    columns = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
    with closing(sqlite3.connect(path)) as database:
        place = 1, 9, 0, 1, 7, None, (1 << 56) | (4711 << 24)
        for kind in (1, 2, 8, 9, 10, 77):
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, 4, ?)", (*place, kind)
            )
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({columns}, value INTEGER)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?, ?, ?, ?, ?, ?, ?, 0)", place)
        database.commit()
    roles = {each.name: each.role for each in one(path).activities if not each.calls and each.start == 0}
    assert set(roles) - before == {"Memcpy HtoD", "Memcpy DtoH", "Memcpy HtoH", "Memcpy PtoP", "Memcpy ", "Memset"}
    assert [name for name, role in roles.items() if role != "other"] == ["Memcpy PtoP"]


def test_the_prediction_is_for_kernels_that_wait_if_kernels_have_waited(tmp_path: Path) -> None:
    ran, ranges = program(1)
    path = tmp_path / "trace.json"
    write_chrome(path, ran, ranges)
    by_memory = compare(one(path), 0)
    wait = range_of(Step("wait", "copy", peers=(3,), channel=0, chunk=(3, 0), label="[ready]"))
    first = ranges[0]
    begun = ranges[-1]._replace(start=first.start - 5)
    write_chrome(
        path,
        [*ran, Ran("wait_kernel", 17, first.start - 1, 1000, 1001)],
        [*ranges[:-1], begun, Ranged(wait, first.start - 2, first.start)],
    )
    by_kernels = compare(one(path), 0)
    assert by_memory is not None
    assert by_kernels is not None
    assert by_kernels.predicted != by_memory.predicted
    known = TRAITS["cuda"].costs
    for found, stream_waits in ((by_memory, True), (by_kernels, False)):
        costs = costs_of(known, Device("NVIDIA H100", stream_waits=stream_waits))
        assert found.predicted == predict(PROBLEM, costs, CHOICE).total


def test_an_unknown_gpu_has_no_prediction(tmp_path: Path) -> None:
    trace = chrome(*program())
    trace["deviceProperties"][0]["name"] = "AMD Instinct MI300X"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert compare(one(path), 0) is None


def test_a_replay_of_a_graph_that_is_recorded_as_a_whole_is_not_idle(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    nsight(path, *program(1))
    before = exposure(one(path).activities)
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, contextId "
            "INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER, graphExecId INTEGER)"
        )
        process = (1 << 56) | (4711 << 24)
        replay = 2_000_000, 2_500_000, 0, 1, 7, 9999, process, 1, 1
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", replay)
        database.commit()
    after = exposure(one(path).activities)
    assert after.other == pytest.approx(before.other + 0.5)


def test_a_compressed_trace_and_a_bare_list_of_events_are_read(tmp_path: Path) -> None:
    trace = chrome(*program())
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert len(one(path).calls) == 2
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(trace["traceEvents"]))
    assert (one(bare).device, one(bare).rank, len(one(bare).calls)) == ("GPU 0", None, 2)


# The time is fixed. It is part of the bytes, and so of the tests' names, which must be the same in every worker.
CUT_SHORT = gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither JSON nor gzipped JSON"),
        (b"\x1f\x8b damaged", "neither JSON nor gzipped JSON"),
        (CUT_SHORT[:40], "neither JSON nor gzipped JSON"),
        (CUT_SHORT[:30] + bytes(30), "neither JSON nor gzipped JSON"),
        (b"[" * 100_000, "neither JSON nor gzipped JSON"),
        (b"not a trace", "neither JSON nor gzipped JSON"),
        (b"\xff\xfe\x00", "neither JSON nor gzipped JSON"),
        (b'{"some": "thing"}', "has no traceEvents"),
        (b"3", "has no traceEvents"),
        (b'{"traceEvents": null}', "has no traceEvents"),
        (b"SQLite format 3\0 damaged", "is not a database of Nsight Systems"),
    ],
)
def test_other_files_are_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_another_database_is_rejected_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a # file?.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE other (id INTEGER)")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no table StringIds"):
        read(path)
    assert path.read_bytes() == before


ODD = (None, "", "x", -1, 3.5, [1], {"a": 1}, True, "7", float("nan"), float("inf"), 10**400)


@pytest.mark.parametrize("seed", range(20))
def test_odd_traces_are_read(seed: int, tmp_path: Path) -> None:
    """A trace may begin or end in the middle of anything, and other tools change it."""
    source = random.Random(seed)
    trace = chrome(*program(4))
    for event in trace["traceEvents"]:
        for place in (event, event["args"]) if "args" in event else (event,):
            for key in [*place]:
                chance = source.random()
                if chance < 0.02:
                    place[key] = source.choice(ODD)
                elif chance < 0.04:
                    del place[key]
            if not isinstance(event.get("args", {}), dict):
                break
    events: list[Any] = [event for event in trace["traceEvents"] if source.random() < 0.9]
    trace["traceEvents"] = [*events, None, 7, {}, {"ph": "X"}, "\x01"]
    for key in ("deviceProperties", "distributedInfo"):
        trace[key] = source.choice([*ODD, [None, {"id": 0}], [{"id": [1]}, {"id": "0"}], {"rank": None}, {"rank": "1"}])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    require_sound(read(path))


def test_names_may_have_any_characters(tmp_path: Path) -> None:
    trace = chrome(*program())
    trace["traceEvents"].append({"ph": "X", "cat": "kernel", "name": "tab\tand \u00fc", "ts": 1, "dur": 1, "args": {}})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace, ensure_ascii=False).replace("\\t", "\t"), encoding="utf-8")
    assert "tab\tand \u00fc" in [each.name for recording in read(path) for each in recording.activities]


def test_a_gpu_with_any_number_is_no_cpu() -> None:
    trace = chrome(*program())
    for event in trace["traceEvents"]:
        if "device" in event.get("args", {}):
            event["args"]["device"] = -1
    assert [recording.device for recording in from_torch_trace(trace, "x")] == ["GPU -1"]
