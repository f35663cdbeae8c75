"""The predicted time of a matmul: waves of tiles, split contractions, and the time to read the factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from symm_overlap.runtime import DeviceCosts
from symm_overlap.runtime.costs import Tile

# In one second, this device does a round number of every kind of work.
PLAIN = DeviceCosts(
    name="plain",
    sms=10,
    tiles=(Tile(10, 10, 1.0), Tile(5, 10, 0.5)),
    splits=(1,),
    flops={torch.float32: 2e4, torch.float8_e4m3fn: 4e4},
    memory=1e6,
    matmul_memory=1e6,
    epilogue=0,
    matmul_start=0.0,
    copy=1e5,
    copy_start=0.25,
    kernel=0.5,
    signal=0.125,
    wait=0.1875,
    stream_wait=1 / 32,
    flag=0.0625,
    event=1 / 512,
    turn=0.0,
    host=1 / 1024,
    host_matmul=1 / 1024,
    library=1e5,
    library_start=2.0,
    held=1,
    pieces=1.0,
    fused=0.5,
    fused_measured=False,
)


def test_a_matmul_takes_whole_waves_and_the_part_of_the_last_one_that_is_free_is_its_tail() -> None:
    # Each SM has 2e3 FLOP/s, so a tile of 10 x 10 takes k / 10 s. 4 x 4 tiles fill 1.6 waves of 10 SMs: 2 waves run.
    assert PLAIN.matmul(40, 40, 10, torch.float32) == pytest.approx((1.6, 0.4 + 0.5))
    assert PLAIN.matmul(50, 40, 10, torch.float32) == pytest.approx((2.0, 0.5))
    # One more tile means one more wave. The smaller tiles, which have half the rate, are no better.
    assert sum(PLAIN.matmul(50, 41, 10, torch.float32)) == pytest.approx(3 + 0.5)


def test_the_shape_of_tiles_is_the_quickest_one() -> None:
    # 5 rows fill half of a large tile. A small tile has half of its FLOP, at half of its rate.
    assert sum(PLAIN.matmul(5, 100, 10, torch.float32)) == pytest.approx(1.0 + 0.5)
    quicker = replace(PLAIN, tiles=(Tile(10, 10, 1.0), Tile(5, 10, 0.8)))
    assert sum(quicker.matmul(5, 100, 10, torch.float32)) == pytest.approx(0.5 / 0.8 + 0.5)


def test_a_wait_that_holds_an_sm_can_cost_a_wave() -> None:
    assert sum(PLAIN.matmul(50, 20, 10, torch.float32)) == pytest.approx(1 + 0.5)
    assert sum(PLAIN.matmul(50, 20, 10, torch.float32, held=1)) == pytest.approx(2 + 0.5)


def test_a_matmul_takes_no_less_than_its_factors_take_to_be_read() -> None:
    slow = replace(PLAIN, matmul_memory=100.0)
    assert slow.matmul(10, 10, 1, torch.float32) == pytest.approx(((10 + 10 + 100) * 4 / 100, 0.5))
    # A kernel that computes several parts reads at the rate of memory, without pauses.
    several = replace(slow, memory=200.0).matmul(10, 10, 1, torch.float32, parts=3)
    assert several == pytest.approx(((10 + 10 + 100) * 4 / 200, 0.5))


def test_a_matmul_has_a_start_and_stores_its_tiles() -> None:
    slow = replace(PLAIN, matmul_start=0.25, epilogue=5)
    assert slow.matmul(50, 40, 10, torch.float32) == pytest.approx((2.0 * 15 / 10, 0.5 + 0.25))


def test_a_contraction_is_split_among_idle_sms_if_adding_up_takes_less() -> None:
    # Four tiles leave six SMs idle. In two parts, each takes half as long, and 2 x 20 x 20 sums in 32 bits are written
    # and read.
    split = replace(PLAIN, splits=(1, 2))
    joined = 2 * 2 * 20 * 20 * 4 / PLAIN.memory
    body, tail = split.matmul(20, 20, 10, torch.float32)
    assert (body, body + tail) == pytest.approx((0.8 / 2 + joined, 0.5 + joined + 0.5))
    assert replace(split, memory=10.0).matmul(20, 20, 10, torch.float32) == PLAIN.matmul(20, 20, 10, torch.float32)
    # A full wave gains nothing. A kernel that computes several parts does not split.
    assert split.matmul(50, 20, 10, torch.float32) == PLAIN.matmul(50, 20, 10, torch.float32)
    several = {"parts": 2, "late": True}
    assert split.matmul(20, 20, 10, torch.float32, **several) == PLAIN.matmul(20, 20, 10, torch.float32, **several)


def test_each_dtype_has_its_rate_and_an_unknown_one_that_of_float32() -> None:
    """Each dtype has its own rate, and an unknown dtype has the rate of float32."""
    assert sum(PLAIN.matmul(10, 10, 10, torch.float8_e4m3fn)) == pytest.approx(0.5 + 0.5)
    assert PLAIN.matmul(10, 10, 10, torch.int8)[0] == PLAIN.matmul(10, 10, 10, torch.float32)[0]


def test_nothing_to_multiply_takes_a_kernel() -> None:
    """A matmul without rows still costs the launch of a kernel."""
    assert sum(PLAIN.matmul(0, 10, 10, torch.float32)) == pytest.approx(10 * 10 * 4 / 1e6 + 0.5)
