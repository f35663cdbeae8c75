"""`all_gather` copies bytes, so it gathers tensors of any dtype. Complex ones have a gradient."""

from __future__ import annotations

import pytest
import torch

import symm_overlap
from tests.ranks import Pool, Rank

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64, torch.complex128),
)
SHAPES = (((3,), 0), ((3, 5), 0), ((3, 5), 1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((0, 3), 0), ((20000, 3), 0))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(*tensor.shape, tensor.element_size())


def shard(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    of_rank = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, (size,), dtype=torch.uint8, generator=of_rank).view(dtype).view(shape)


def all_bits_arrive(me: Rank, path: str) -> None:
    for dtype in DTYPES:
        for shape, dim in SHAPES:
            with symm_overlap.force_path(path, chunks=2):
                gathered = symm_overlap.all_gather(shard(shape, dtype, me.rank).to(me.device), dim, me.group).cpu()
            assert gathered.dtype == dtype
            expected = torch.cat([bits(shard(shape, dtype, rank)) for rank in range(me.world)], dim % len(shape))
            assert torch.equal(bits(gathered), expected), (dtype, shape, dim)


@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_bit_of_every_dtype_arrives(ranks: Pool, world: int, path: str) -> None:
    ranks.run(world, all_bits_arrive, path)


def complex_tensors_have_a_gradient(me: Rank) -> None:
    for dim in (0, 1, -1):
        shards = torch.arange(12.0 * me.world, dtype=torch.float64).view(me.world, 3, 4) * (1 + 2j)
        weight = torch.complex(*torch.ones(2, 12 * me.world, dtype=torch.float64).cumsum(1))
        mine = shards[me.rank].clone().requires_grad_()
        gathered = symm_overlap.all_gather(mine, dim, me.group)
        assert torch.equal(gathered, torch.cat(list(shards), dim))
        ((weight.view_as(gathered) * gathered).conj()).real.sum().backward()
        expected = me.world * weight.view_as(gathered).chunk(me.world, dim)[me.rank].conj()
        torch.testing.assert_close(mine.grad, expected)


def lazily_conjugated_tensors_are_gathered_as_their_values(me: Rank) -> None:
    x = torch.complex(torch.ones(3), torch.full((3,), 1.0 + me.rank))
    for tensor in (x.conj(), x.conj().imag):
        gathered = symm_overlap.all_gather(tensor, 0, me.group)
        assert torch.equal(gathered[3 * me.rank :][:3].resolve_conj(), tensor.resolve_conj().resolve_neg())


def integers_are_gathered_in_compiled_functions(me: Rank) -> None:
    x = torch.arange(4) + me.rank
    double = torch.compile(lambda x: 2 * symm_overlap.all_gather(x, 0, me.group), fullgraph=True, backend="aot_eager")
    assert double(x).tolist() == [2 * (i + rank) for rank in range(me.world) for i in range(4)]


@pytest.mark.parametrize(
    "check",
    [
        complex_tensors_have_a_gradient,
        lazily_conjugated_tensors_are_gathered_as_their_values,
        integers_are_gathered_in_compiled_functions,
    ],
)
def test_other_dtypes_behave_as_in_torch(ranks: Pool, check: object) -> None:
    ranks.run(2, check)
