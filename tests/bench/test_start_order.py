"""``bench.start_order``: how recorded start times are counted, and where they are recorded."""

from __future__ import annotations

import time

import pytest
import torch

from bench import start_order
from bench.emulation.link import Link
from bench.emulation.rank import emulated
from bench.harness.case import Case
from bench.start_order import VARIANTS, counted, starts, table

A, B, SAME = [100, 300], [300, 100], [200, 200]  # compute0 first, compute1 first, both at once


def test_orders_are_counted_over_all_ranks_and_compared_run_by_run() -> None:
    found = counted([[A, B, B, B], [A, B, A, [100, 500]]])
    assert found["runs"] == 4
    assert (found["compute0_first"], found["compute1_first"]) == (4, 4)
    assert found["agree"] == 2, "in the first two runs"
    assert found["median_gap_ns"] == 200
    ties = counted([[A, SAME, SAME], [SAME, SAME, B]])
    assert (ties["compute0_first"], ties["compute1_first"], ties["equal"], ties["agree"]) == (1, 1, 4, 0)
    alone = counted([[B] * 200])
    assert (alone["compute0_first"], alone["compute1_first"], alone["agree"]) == (0, 200, 200)
    row = {"m": 8, "n": 1, "k": 1, "plan": "ours", "order": "sleep", "median_ms": 1.5, **alone}
    assert table([row]).splitlines()[1].split()[3:] == ["ours", "sleep", "0", "200", "0", "200/200", "200", "1.500"]


class Recorder:
    """A host clock that records which streams were stamped, and when."""

    def __init__(self) -> None:
        self.times = [0, 0]
        self.stamps: list[int] = []

    def stamp(self, index: int) -> None:
        self.stamps.append(index)
        self.times[index] = time.monotonic_ns()

    def read(self) -> list[int]:
        return list(self.times)


@pytest.mark.parametrize("world", [2, 4])
def test_the_first_matmul_of_either_stream_is_stamped_once_a_run(world: int) -> None:
    case = Case("matmul_reduce_scatter", 4 * world, 3, 5, torch.float32, world)
    with emulated(world, "cpu", Link.parse("device")) as rank:
        for variant in VARIANTS:
            clock = Recorder()
            found = starts(rank, case, variant, 3, clock)
            assert sorted(clock.stamps) == [0] * 4 + [1] * 4, "three runs, and one that allocates the workspace"
            assert len(found) == 3
            assert all(each > 0 for run in found for each in run)
            assert len({tuple(run) for run in found}) == 3


def test_the_order_wait_makes_the_second_stream_start_first_on_cpu_too() -> None:
    case = Case("matmul_reduce_scatter", 12, 3, 5, torch.float32, 3)
    (waiting,) = [each for each in VARIANTS if each.order == "wait"]
    with emulated(3, "cpu", Link.parse("device")) as rank:
        found = counted([starts(rank, case, waiting, 5, Recorder())])
    assert (found["compute1_first"], found["agree"]) == (5, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        start_order.main(["--emulate", "2", "--shapes", "8,8,8"])
    assert ended.value.code == 2
    assert "needs a GPU: on a CPU streams are threads" in capsys.readouterr().err
