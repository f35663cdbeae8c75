"""Predictions of random calls are valid times. They never grow on a faster device, nor shrink for a larger call."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.prediction import predict
from symm_overlap.collective.choosing.quickest import REQUIRED_RATIO, REQUIRED_SAVING_MS
from symm_overlap.collective.problem import OPS, Problem, problem
from symm_overlap.runtime import TRAITS, Device, DeviceCosts, costs_of
from symm_overlap.settings import Settings

KNOWN = TRAITS["cuda"].costs
ROUNDED = 1 + 1e-9
ANOMALY = 1.1
"""The tolerance for a faster device. SMs go to the kernel that arrives first. If some kernels become faster, another
one may arrive first, and the longest one may start later. So a call may take a little longer, also in reality."""

Sizes = tuple[int, int, int]


def calls(seed: int, count: int) -> Iterator[tuple[str, Sizes, int, torch.dtype, bool, Device]]:
    source = random.Random(seed)
    for number in range(count):
        op, world = sorted(OPS)[number % len(OPS)], source.choice([2, 3, 4, 8, 16])
        m, n, k = (int(2 ** source.uniform(0, 14)) for _ in range(3))
        m = max(2, m) if OPS[op].replicates else source.choice([0, *[-(-m // world) * world] * 9])
        sizes = m, n, k if OPS[op].multiplies and not OPS[op].moves_weight else 0
        dtype = source.choice([torch.bfloat16, torch.float16, torch.float32, torch.float64])
        last = not OPS[op].replicates and source.random() < 0.3
        yield op, sizes, world, dtype, last, Device(source.choice(KNOWN).name, source.random() < 0.5)


def of(op: str, sizes: Sizes, world: int, dtype: torch.dtype, last: bool) -> Problem:
    return problem(op, *sizes, dtype, world, "cuda", last_dim=last)


def arranged_as(call: Problem, candidate: Candidate, device: Device) -> Choice:
    path, chunks, span = candidate
    settings = Settings(path=path, chunks=None if path == "sequential" else chunks, span=span)
    return choose(call, settings, direct=True, device=device)


def faster(costs: DeviceCosts, by: float) -> dict[str, tuple[DeviceCosts, float]]:
    """Return devices that are faster in one respect, and the factor by which a prediction for them may still grow."""
    flops = {dtype: by * rate for dtype, rate in costs.flops.items()}
    small = {name: getattr(costs, name) / by for name in ("signal", "wait", "flag", "event", "kernel", "host")}
    return {
        "link": (replace(costs, copy=by * costs.copy, library=by * costs.library), ROUNDED),
        "start": (replace(costs, copy_start=costs.copy_start / by, library_start=0.0), ANOMALY),
        "flops": (replace(costs, flops=flops), ANOMALY),
        "memory": (replace(costs, memory=by * costs.memory), ANOMALY),
        "small": (replace(costs, **small), ANOMALY),
    }


@pytest.mark.parametrize("seed", range(2))
def test_a_prediction_is_a_time_and_the_chosen_one_is_clearly_less_than_plain(seed: int) -> None:
    for op, sizes, world, dtype, last, device in calls(seed, 60):
        choice = choose(of(op, sizes, world, dtype, last), Settings(), direct=True, device=device)
        for each in choice.predictions:
            times = each.total, each.matmul, each.moves, each.meets, each.host
            assert all(0 <= time < math.inf for time in times), choice
            assert each.total > 0
            assert each.total * ROUNDED >= each.host or each.path == "sequential"
        plain = choice.predictions[0].total
        (chosen,) = (each for each in choice.predictions if each.candidate == choice.candidate)
        assert (
            choice.path == "sequential"
            or chosen.total <= min(REQUIRED_RATIO * plain, plain - REQUIRED_SAVING_MS) * ROUNDED
        )
        assert choice.path != "fused" or costs_of(KNOWN, device).fused_measured


def test_no_call_takes_longer_on_a_faster_device() -> None:
    for op, sizes, world, dtype, last, device in calls(2, 40):
        call, costs = of(op, sizes, world, dtype, last), costs_of(KNOWN, device)
        for each in choose(call, Settings(), direct=True, device=device).predictions:
            arranged = arranged_as(call, each.candidate, device)
            for what, (quicker, more) in faster(costs, 1.7).items():
                found = predict(call, quicker, arranged).total
                assert found <= each.total * more, (what, call, each)


def test_no_larger_call_takes_less_time() -> None:
    for op, (m, n, k), world, dtype, last, device in calls(3, 60):
        call, costs = of(op, (m, n, k), world, dtype, last), costs_of(KNOWN, device)
        for each in choose(call, Settings(), direct=True, device=device).predictions if m else ():
            for sizes in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
                larger = of(op, sizes, world, dtype, last)
                same = arranged_as(call, each.candidate, device)
                arranged = replace(arranged_as(larger, each.candidate, device), copies=same.copies)
                # The tile shape that is fastest for a whole persistent kernel may not be the fastest for its last
                # part.
                more = ANOMALY if each.path == "fused" else ROUNDED
                if arranged.candidate == each.candidate:
                    assert predict(larger, costs, arranged).total * more >= each.total, (sizes, call, each)
