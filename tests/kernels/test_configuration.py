"""The tiles of a fused matmul depend only on its shape, dtype and architecture."""

from __future__ import annotations

import itertools

import pytest
import torch

from symm_overlap.kernels.configuration import (
    RESERVED_SHARED_BYTES,
    SHARED_BYTES,
    Configuration,
    are_aligned,
    configure,
    programs,
)
from tests.kernels.interpreted import FLOATS

E4M3 = torch.float8_e4m3fn
SIZES = (1, 16, 64, 100, 512, 1024, 4096)


def test_every_shape_has_tiles_that_fit() -> None:
    for architecture, dtype, rows, n, aligned in itertools.product(
        SHARED_BYTES, (*FLOATS, E4M3), SIZES, SIZES, (True, False)
    ):
        found = configure(rows, n, 4096, dtype, architecture, aligned=aligned)
        assert found.shared_bytes(dtype.itemsize) <= SHARED_BYTES[architecture] - RESERVED_SHARED_BYTES
        assert all(size & (size - 1) == 0 and size >= 16 for size in (found.tile_m, found.tile_n, found.tile_k))
        assert found.tile_m < max(32, 2 * rows), "a tile is less than twice as long as a rank's part"
        assert found.group * found.tile_m <= max(found.tile_m, rows), "a group of tiles ends in the same part"
        assert found.descriptors == (architecture >= 90 and aligned and dtype.itemsize <= 2)


def test_large_matmuls_have_the_largest_tiles_of_their_architecture() -> None:
    """The shape is that of Llama-3 70B's gate and up projections on 8 ranks."""
    shape = 1024, 7168, 8192
    assert configure(*shape, torch.bfloat16, 80) == Configuration(128, 128, 64, 8, 8, 3)
    assert configure(*shape, torch.bfloat16, 90) == Configuration(128, 256, 64, 8, 8, 4, descriptors=True)
    assert configure(128, 1024, 8192, torch.bfloat16, 90).tile_n == 128, "more tiles are preferred to wider ones"
    assert configure(512, 1024, 8192, torch.bfloat16, 90, total=3 * 1024).tile_n == 128
    assert configure(1024, 7168, 8192, torch.bfloat16, 90, total=2 * 7168).tile_n == 256
    assert configure(*shape, torch.float8_e4m3fn, 90) == Configuration(128, 128, 128, 8, 8, 4, descriptors=True)
    assert configure(*shape, torch.bfloat16, 90, aligned=False) == Configuration(64, 64, 32, 8, 8, 3)


def test_tiles_are_wide_if_the_rows_of_all_ranks_fill_the_waves() -> None:
    """The layers of Llama-3 on 8 ranks. The own part of a rank may have fewer wide tiles than there are programs."""
    wide = {
        n: configure(1024, n, 8192, torch.bfloat16, 90, all_rows=8192).tile_n == 256
        for n in (768, 1280, 2304, 3584, 4096, 7168, 8192, 13312, 28672)
    }
    assert [n for n, found in wide.items() if not found] == [768, 1280]
    assert configure(1024, 768, 8192, torch.bfloat16, 90, all_rows=8192, total=3 * 768).tile_n == 256
    assert configure(64, 28672, 8192, torch.bfloat16, 90, all_rows=8192).tile_n == 128, "only for tiles of 128 rows"


def test_an_architecture_without_kernels_is_an_error() -> None:
    with pytest.raises(ValueError, match="architecture is 70: kernels are known for 80, 90, 100"):
        configure(64, 64, 64, torch.float16, 70)


def test_a_multiprocessor_is_left_for_small_kernels() -> None:
    assert programs(132) == 131
    assert programs(1) == 1


def test_aligned_matrices() -> None:
    matrix = torch.empty(64, 48)
    assert are_aligned(matrix, matrix.t(), matrix[:, :32], matrix[16:])
    assert are_aligned(matrix[:41], matrix[:41].t()), "any number of rows, if they begin at multiples of 16"
    for other in (matrix[:, 1:33], matrix[:, :40], matrix.t()[:40], matrix[:, ::2], torch.empty(64, 40)[:, :32]):
        assert not are_aligned(matrix, other)
