"""Ordinary models, pipelined by one call, have the losses, gradients and outputs of the whole model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.model.models import MODELS, make
from tests.pipeline.model.reference import trains_like_the_whole
from tests.quick import one_in
from tests.ranks import Pool


def check(ranks: Pool, world: int, name: str, layers: int, schedule: str, count: int, **more: Any) -> None:
    found = ranks.run(world, trains_like_the_whole, name, layers, schedule, count, more, timeout=120)
    keys = make(name, layers)[0].state_dict().keys()
    assert {key for part in found for key in part} == set(keys), "all ranks' state dicts must have the model's keys"


# These take seconds to trace.
LARGE = [("encoder", "ZBVZeroBubble"), ("llama", "Interleaved1F1B"), ("mixtral", "ZBVZeroBubble")]
SMALL = [name for name in MODELS if name not in ("encoder", "gpt2", "llama", "mixtral")]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt2", "1F1B"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LARGE),
        *one_in(2, ((name, schedule) for name in SMALL for schedule in ("ZBVZeroBubble", "GPipe"))),
    ],
)
def test_a_model_on_two_ranks_trains_like_the_whole(ranks: Pool, name: str, schedule: str) -> None:
    check(ranks, 2, name, 4, schedule, 4)


@pytest.mark.parametrize("name", ["unet", "choosy"])
def test_a_model_on_one_rank_trains_like_the_whole(ranks: Pool, name: str) -> None:
    check(ranks, 1, name, 4, "Interleaved1F1B", 3)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("unet", "ZBVZeroBubble"), pytest.param("shared", "Interleaved1F1B", marks=pytest.mark.slow)],
)
def test_a_model_on_four_ranks_trains_like_the_whole(ranks: Pool, name: str, schedule: str) -> None:
    check(ranks, 4, name, 8, schedule, 4)


@pytest.mark.parametrize(
    ("name", "transport"), [pytest.param("gpt2", "symmetric", marks=pytest.mark.slow), ("shared", "c10d")]
)
def test_microbatches_may_have_different_sizes(ranks: Pool, name: str, transport: str) -> None:
    check(ranks, 2, name, 4, "1F1B", 3, transport=transport)


def test_there_may_be_fewer_microbatches_than_stages(ranks: Pool) -> None:
    check(ranks, 4, "unet", 4, "1F1B", 2)
