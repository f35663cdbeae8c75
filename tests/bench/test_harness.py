"""Launching ranks, timing, and measuring memory, each tested with a known result."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.harness import memory
from bench.harness.case import Case
from bench.harness.launch import Rank, StartLine, launch
from bench.harness.run_case import run_case
from bench.harness.timing import Timed, over_ranks, time_methods
from bench.methods import METHODS, Method, Prepared
from bench.methods.method import pair


def alone(folder: Path) -> Rank:
    """Return the only rank of a world of one, without a process group."""

    class Alone(Rank):
        def all(self, value: object) -> list[object]:
            return [value]

    StartLine.create(folder / "start", 1)
    return Alone(0, 1, torch.device("cpu"), "none", StartLine(folder / "start", 0, 1))


def test_every_round_calls_every_method_in_a_new_order(tmp_path: Path) -> None:
    calls: list[str] = []
    methods = {name: Timed(lambda name=name: (calls.append(name), time.sleep(0.002))) for name in "abc"}  # type: ignore[misc]
    samples = time_methods(alone(tmp_path), methods, 6, warm_up=1, fill_ms=0.0)
    assert {name: len(one) for name, one in samples.items()} == {"a": 6, "b": 6, "c": 6}
    rounds = ["".join(calls[i : i + 3]) for i in range(3, 21, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert all(one >= 2.0 for times in samples.values() for one in times)  # in milliseconds, including the sleep


def test_quick_methods_are_called_more_often_a_round(tmp_path: Path) -> None:
    methods = {"quick": Timed(lambda: None), "slow": Timed(lambda: time.sleep(0.01))}
    samples = time_methods(alone(tmp_path), methods, 2, warm_up=2, fill_ms=20.0)
    assert len(samples["quick"]) == 20
    assert len(samples["slow"]) == 2


def test_slowest_rank_counts() -> None:
    assert over_ranks([[1.0, 2.0, 9.0], [3.0, 3.0, 3.0]])["median_ms"] == 3.0


def test_start_line_gives_up_on_a_rank_that_never_comes(tmp_path: Path) -> None:
    StartLine.create(tmp_path / "start", 2)
    with pytest.raises(TimeoutError, match="rank 1 of 2"):
        StartLine(tmp_path / "start", 0, 2, timeout_s=0.05).wait()


@pytest.mark.skipif(bool(memory.why_not("cpu")), reason="no resettable high-water mark here")
def test_memory_meter_sees_what_came_and_went() -> None:
    size = 64 << 20

    def touch(size: int) -> None:
        block = mmap.mmap(-1, size)
        for at in range(0, size, 4096):
            block[at] = 1
        block.close()

    touch(2 * size)  # an earlier, higher peak must not hide this one
    grown = memory._CpuMeter().growth(lambda: touch(size))
    assert 0.95 * size < grown < 1.1 * size
    assert memory._CpuMeter().growth(lambda: None) < 1 << 20


def swapped(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """A wrong all-gather-matmul, which stores the shards in the order in which they arrive."""
    right = METHODS["plain_allocating"].prepare(rank, case, a, b)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        output, gathered = right.call()
        return output.roll(-rank.rank * case.rows, 0), gathered

    return Prepared(call, pair)


def run_swapped(rank: Rank) -> dict[str, object]:
    case = Case("all_gather_matmul", 32, 16, 64, torch.float32, rank.world)
    methods = [METHODS["plain"], Method("swapped", "swapped", swapped)]
    rows = run_case(rank, case, methods, rounds=1, seed=0)
    return {row["method"]: (row["exact"], row["detail"].split(" is ")[0], row["ok"]) for row in rows}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_a_method_with_shards_in_arrival_order_is_caught_on_every_rank() -> None:
    expected = {"plain": (True, "", True), "swapped": (False, "rank 1: output[0, 0]", False)}
    for found in launch(run_swapped, 2, "cpu"):
        assert found["plain"] == expected["plain"]
        exact, where, ok = found["swapped"]
        assert (exact, ok) == (False, False)
        assert where.startswith("rank 1: output[")


def fail_on_rank_1(rank: Rank) -> None:
    dist.barrier()  # otherwise rank 0 may fail too, while it connects to a rank that has ended
    if rank.rank == 1:
        raise ValueError("this rank fails")
    rank.start.wait()


@pytest.mark.usefixtures("forked_ranks")
def test_a_failing_rank_ends_all_and_shows_its_traceback() -> None:
    begin = time.monotonic()
    with pytest.raises(Exception, match="this rank fails"):
        launch(fail_on_rank_1, 2, "cpu")
    assert time.monotonic() - begin < 60
