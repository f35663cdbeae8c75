"""Real calls of real ranks, recorded by torch's profiler."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import symm_overlap
from symm_overlap.plan import Plan, Table
from symm_overlap.profile import exposure_of_call, kinds_of_calls, page, read, record, report
from symm_overlap.settings import transformed
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.runtime.described_calls import all_calls
from tests.transforms import comparing

LATE = 0.3


def unchanged(plan: Plan, table: Table) -> Table:
    """A step transform that changes nothing. With any transform, Python runs the steps one by one."""
    return table


def steps_of(call: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Return the names of the calls that a function makes, and their steps, as they were recorded."""
    with record() as recorded:
        call()
    (recording,) = recorded.recordings
    assert recording.on_cpu
    for found, activities in zip(recording.calls, recording.activities_of_calls, strict=True):
        assert all(found.start <= each.start <= each.end <= found.end for each in activities)
    return [call.name for call in recording.calls], [str(each.step) for each in recording.activities]


def same_ranges(me: Rank, lane: int, path: str, chunks: int) -> None:
    for name, call in all_calls(me.group, me.rank).items():
        with symm_overlap.lane(lane), symm_overlap.force_path(path, chunks=chunks):
            call()
            issued = steps_of(call)
            with transformed(unchanged):
                by_python = steps_of(call)
        assert issued == by_python, name
        assert any(" wait " in f" {step}" or step.startswith("barrier") for step in issued[1]), name
        assert all(f"device=cpu rank={me.rank} world={me.world} " in each for each in issued[0])


@pytest.mark.parametrize(("world", "path", "chunks"), one_in(2, [(2, "pipelined", 2), (2, "sequential", 1)]))
def test_every_step_is_a_range_whether_python_runs_it_or_not(
    ranks: Pool, fresh_lane: Callable[[], int], world: int, path: str, chunks: int
) -> None:
    ranks.run(world, same_ranges, fresh_lane(), path, chunks)


def waits_for_a_late_rank(me: Rank, lane: int) -> tuple[float, float]:
    x = torch.ones(8, 4)
    with symm_overlap.lane(lane), comparing(False):  # a comparison waits for the peers before the call begins
        symm_overlap.all_reduce(x, "sum", me.group)
        with record() as recorded:
            symm_overlap.all_reduce(x, "sum", me.group)
            if me.rank == 1:
                time.sleep(LATE)
            symm_overlap.all_reduce(x, "sum", me.group)
    (recording,) = recorded.recordings
    spent = exposure_of_call(recording, 1)
    return spent.total, spent.waits


def test_the_time_until_a_late_rank_comes_is_exposed_as_waiting(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    (total, waited), (late_total, _) = ranks.run(2, waits_for_a_late_rank, fresh_lane())
    assert 0.8 * LATE * 1e3 < waited <= total
    assert late_total < total


def writes_a_trace(me: Rank, lane: int, folder: Path) -> list[str]:
    x, weight = torch.ones(64, 32), torch.ones(32, 48)
    path = folder / f"{me.rank}.json"
    with symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=2):
        for _ in range(2):
            with record(path) as recorded:
                for _ in range(3):
                    symm_overlap.all_gather_matmul(x, [weight], 0, me.group)
    (written,) = read(path)
    (here,) = recorded.recordings
    assert (written.rank, written.calls, written.activities) == (me.rank, here.calls, here.activities)
    (kind,) = kinds_of_calls(written)
    assert (kind.count, written.source, here.source) == (3, str(path), str(path))
    text = page([written])
    assert text.count("<svg ") == 1, "a CPU has no prediction"
    assert "consume chunk 1.1" in text
    return report([written]).splitlines()


def test_a_trace_is_read_again(ranks: Pool, fresh_lane: Callable[[], int], tmp_path: Path) -> None:
    for rank, lines in enumerate(ranks.run(2, writes_a_trace, fresh_lane(), tmp_path)):
        assert lines[0] == f"{tmp_path / f'{rank}.json'}: rank {rank}, CPU"
        assert lines[2] == (
            "  all_gather_matmul((64, 32), (32, 48), weights=1, gather_dim=0, return_A=True) of torch.float32, "
            "2 ranks, pipelined, 2 chunks"
        )
        assert lines[3].split()[0] == "3"
        assert json.loads((tmp_path / f"{rank}.json").read_text())["distributedInfo"]["rank"] == rank


def calls_alone(me: Rank) -> str:
    with record() as recorded:
        symm_overlap.all_reduce(torch.ones(4, 4), "sum", me.group)
    return str(recorded)


def calls_through_torch(me: Rank) -> str:
    with comparing(False), record() as recorded:
        for path in ("c10d", "c10d", "pipelined"):
            with symm_overlap.force_path(path):
                symm_overlap.all_reduce(torch.ones(4, 4), "sum", me.group)
    return str(recorded)


def test_calls_without_steps_are_counted(ranks: Pool) -> None:
    (text,) = ranks.run(1, calls_alone)
    assert re.search(r"no steps were recorded of 1 calls, on the host \d+\.\d+ ms in all: all_reduce", text), text
    for text in ranks.run(2, calls_through_torch):
        assert "no steps were recorded of 2 calls" in text
        assert "  all_reduce((4, 4)" in text, "the call with steps has its row"


def test_a_file_that_cannot_be_written_loses_no_recording(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), record(tmp_path / "none" / "trace.json") as recorded:
        pass
    assert str(recorded) == "neither an activity of a GPU nor a call of symm_overlap was recorded"
    with record(tmp_path / "trace.json.gz"):
        torch.ones(2)
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_a_second_profiler_is_an_error_and_no_crash() -> None:
    """torch has one profiler: a second one ends the first, and writing the trace of the first crashes."""
    torchs = partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU])
    for first in (record, torchs):
        with first(), pytest.raises(RuntimeError, match="another profiler of torch is recording"), record():
            pass
    with pytest.raises(RuntimeError, match="was started in the block, and ended this one"), record(), torchs():
        pass
    with ThreadPoolExecutor(1) as thread:
        with record(), pytest.raises(RuntimeError, match="another profiler of torch is recording"):
            thread.submit(recorded_nothing).result()
        assert "neither" in thread.submit(recorded_nothing).result()
    assert "neither" in recorded_nothing()


def recorded_nothing() -> str:
    with record() as recorded:
        pass
    return str(recorded)


def test_nothing_is_recorded_outside_of_a_profiler() -> None:
    from symm_overlap import _C

    assert not _C.profiled()
    with record():
        assert _C.profiled()
    assert not _C.profiled()
