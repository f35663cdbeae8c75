"""Random training programs compute with `symm_overlap.fsdp` what they compute with plain FSDP2."""

from __future__ import annotations

import pytest

from tests.fsdp.programs import difference
from tests.quick import one_in
from tests.ranks import Pool


@pytest.mark.parametrize("seeds", one_in(9, [range(first, first + 8) for first in range(0, 72, 8)]), ids=str)
def test_two_ranks_compute_every_bit_of_plain_fsdp2(ranks: Pool, seeds: range) -> None:
    """On two ranks, gloo and we add the same two numbers, so every bit is the same."""
    for seed in seeds:
        assert ranks.run(2, difference, seed, True) == ["", ""], f"the program with the seed {seed}"


@pytest.mark.slow
def test_four_ranks_compute_the_same_as_plain_fsdp2(ranks: Pool) -> None:
    for seed in range(100, 115):
        assert ranks.run(4, difference, seed, False) == [""] * 4, f"the program with the seed {seed}"
