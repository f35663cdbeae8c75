"""The plans of a GPU, which copy peers' data before computing with it, give exact values on CPU too."""

from __future__ import annotations

import pytest
import torch

from tests.collective.test_values import OPS
from tests.ranks import Pool, Rank
from tests.transforms import in_place

PATHS = [("sequential", 1, 1), ("pipelined", 1, 1), ("pipelined", 3, 1), ("pipelined", 2, 2)]


def with_copies(me: Rank, op: str, path: tuple[str, int, int], dtype: torch.dtype) -> None:
    with in_place(False):
        OPS[op](me, path, dtype)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3])
def test_exact_values_and_strides_of_the_reference(
    ranks: Pool, world: int, op: str, path: tuple[str, int, int]
) -> None:
    ranks.run(world, with_copies, op, path, torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_exact_values_in_half_precision(ranks: Pool, op: str) -> None:
    ranks.run(3, with_copies, op, PATHS[3], torch.bfloat16)
