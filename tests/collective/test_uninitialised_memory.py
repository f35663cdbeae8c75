"""Memory that has not been written yet never affects a result, whatever it contains."""

from __future__ import annotations

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Pool, Rank
from tests.transforms import poisoned_outputs


def gather_into_poisoned_memory(me: Rank, dtype: torch.dtype, columns: int, path: str, chunks: int) -> None:
    shards = [ref.binary((100, columns), dtype, seed=rank) for rank in range(me.world)]
    B = ref.binary((me.world * columns, 40), dtype, seed=9)
    with poisoned_outputs(), symm_overlap.force_path(path, chunks=chunks):
        gathered, (product,) = symm_overlap.all_gather_matmul(shards[me.rank], [B], 1, me.group)
    assert gathered is not None
    torch.testing.assert_close(gathered, torch.cat(shards, 1), rtol=0, atol=0)
    torch.testing.assert_close(product, torch.cat(shards, 1) @ B, rtol=0, atol=0)


@pytest.mark.parametrize(("path", "chunks"), [("sequential", 1), ("pipelined", 1), ("pipelined", 2), ("c10d", 2)])
@pytest.mark.parametrize("columns", [3, 4, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_part_is_multiplied_without_its_neighbours(
    ranks: Pool, dtype: torch.dtype, columns: int, path: str, chunks: int
) -> None:
    # On CPUs with AMX, torch's bfloat16 matmul reads beyond the last column if the columns do not fill whole blocks.
    ranks.run(2, gather_into_poisoned_memory, dtype, columns, path, chunks)
