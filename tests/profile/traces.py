"""A small program on a GPU, as the profilers write it down: every activity with its launch, in ranges of ours."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.exchange.ranges import name_of_range
from symm_overlap.collective.planners import all_gather_consume
from symm_overlap.collective.problem import problem
from symm_overlap.plan.ranges import range_of
from symm_overlap.profile import Recording, kinds_of_calls, page, report

PROBLEM = problem(
    "all_gather_matmul", 4096, 2048, 4096, torch.bfloat16, 4, "cuda", arguments=((1024, 4096), ("gather_dim", 0))
)
CHOICE = Choice("pipelined", "planned", "", compute=("compute0", "compute1"), copy="copy")
RANK = 2
KERNEL = {
    "consume": "gemm",
    "publish": "Memcpy DtoD",
    "pull": "Memcpy DtoD",
    "signal": "symm_overlap::cuda::write_kernel",
}


class Ran(NamedTuple):
    """One activity. Times are in microseconds."""

    name: str
    stream: int
    launched: float
    start: float
    end: float


class Ranged(NamedTuple):
    """A range of ours on the thread that launches."""

    name: str
    start: float
    end: float


def program(calls: int = 2) -> tuple[list[Ran], list[Ranged]]:
    """Return what was recorded of calls one after another, each followed by a matmul of the model.

    Every step takes 10 us to issue and 20 us to run, after the step before it on its stream.
    """
    plan = all_gather_consume(RANK, PROBLEM.world, compute=CHOICE.compute, copy=CHOICE.copy)
    numbers = {"compute0": 7, "compute1": 13, "copy": 17}
    ran: list[Ran] = []
    ranges: list[Ranged] = []
    now = 1000.0
    for _ in range(calls):
        begun, done = now, dict.fromkeys(numbers.values(), now)
        for step in plan.steps:
            if step.kind in ("fork", "join", "sleep", "wait"):  # waits are memory operations, which are not recorded
                continue
            stream = numbers[step.stream]
            start = max(done[stream], now + 5)
            done[stream] = start + 20
            ranges.append(Ranged(range_of(step), now, now + 9))
            ran.append(Ran(KERNEL[step.kind], stream, now + 3, start, done[stream]))
            now += 10
        ranges.append(Ranged(name_of_range(PROBLEM, CHOICE, RANK), begun, now))
        now = max(*done.values(), now) + 50
        ran.append(Ran("gemm of the model", 7, now, now + 4, now + 40))
        ran.append(Ran("ncclDevKernel_AllReduce", 23, now + 2, now + 30, now + 60))
        now += 100
    return ran, ranges


def chrome(ran: list[Ran], ranges: list[Ranged]) -> dict[str, Any]:
    """Return the program as a trace of torch's profiler."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 4711, "args": {"name": "python"}}]
    for number, each in enumerate(ran, start=100):
        given = {"correlation": number, "stream": each.stream, "device": 0}
        copy = each.name.startswith("Memcpy")
        where = {"ph": "X", "args": given}
        events.append(
            where
            | {"cat": "gpu_memcpy" if copy else "kernel", "name": each.name, "pid": 0, "tid": each.stream}
            | {"ts": each.start, "dur": each.end - each.start}
        )
        events.append(
            where
            | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4711, "tid": 99, "ts": each.launched, "dur": 2}
        )
    for each in ranges:
        place = {"ph": "X", "pid": 4711, "tid": 99, "ts": each.start, "dur": each.end - each.start}
        events.append(place | {"cat": "user_annotation", "name": each.name})
        # What torch's profiler adds by itself: the time on the GPU of what was launched in the range.
        events.append(place | {"cat": "gpu_user_annotation", "name": each.name, "pid": 0, "tid": 7})
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4711, "tid": 99, "ts": 0, "dur": 5})
    return {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"rank": 2, "world_size": 4},
        "traceEvents": events,
    }


_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER, uuid TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category
    INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName
    INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT
    NULL, copyKind INTEGER NOT NULL);
"""


def nsight(path: Path, ran: list[Ran], ranges: list[Ranged], pid: int = 4711) -> None:
    """Write the program as an export of Nsight Systems, with the columns of NVIDIA's documentation that matter here."""
    process = (1 << 56) | (pid << 24)
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts) + 1)

    def ns(time: float) -> int:
        return round(time * 1000)

    with closing(sqlite3.connect(path)) as database:
        database.executescript(_SCHEMA)
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 3, 'NVIDIA H100 80GB HBM3')")
        database.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (3, 0, ?, '')", (pid,))
        for number, each in enumerate(ran, start=100):
            times = ns(each.start), ns(each.end)
            where = 0, 1, each.stream, number, process
            launched = ns(each.launched), ns(each.launched) + 2000, 0, process | 99, number, text("cudaLaunchKernel"), 0
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", launched)
            if each.name.startswith("Memcpy"):
                copied = (*times, *where, 4096, 8)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", copied)
            else:
                named = (*times, *where, text(each.name), text(each.name))
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", named)
        for number, each in enumerate(ranges):
            # emit_nvtx adds the number of the op; short texts are stored in place, others as a number
            name = f"{each.name}, op_id = {number}"
            stored = (name, None) if number % 2 else (None, text(name))
            database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, NULL, NULL, ?, ?, NULL, ?, 0)",
                (ns(each.start), ns(each.end), stored[0], process | 99, stored[1]),
            )
        database.execute(
            "INSERT INTO NVTX_EVENTS VALUES (?, NULL, 59, NULL, NULL, NULL, ?, ?, NULL, NULL, 0)",
            (5, ranges[-1].name, process | 99),
        )
        database.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(number, value) for value, number in texts.items()]
        )
        database.commit()


def write_chrome(path: Path, ran: list[Ran], ranges: list[Ranged]) -> None:
    path.write_text(json.dumps(chrome(ran, ranges)))


def require_sound(found: Sequence[Recording]) -> None:
    """Assert that something is left of odd traces, that its figures are times, and that it can be shown."""
    assert sum(len(recording.activities) for recording in found) > 10
    for recording in found:
        for kind in kinds_of_calls(recording):
            spent = kind.median
            assert math.isfinite(spent.total)
            assert spent.total >= spent.compute >= 0
        assert report([recording], steps=True)
        assert page([recording])
