"""`symm_overlap.empty` creates the same tensor as torch.empty, in memory that peers read in place in a gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import symm_overlap
from symm_overlap.runtime import NotPreparedError, state_of
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.runtime.cpu.workspace import CpuWorkspace
from tests.collective import reference as ref
from tests.ranks import Pool, Rank
from tests.transforms import comparing, forget_routes, recorded

ROWS, COLUMNS = 5, 4


@contextmanager
def gpu_like(yes: bool) -> Iterator[None]:
    """With True, act as a GPU: peers' data is copied, and ranks cannot announce in a call where its input is stored."""
    if not yes:
        yield
        return
    number = lambda self, tensor, group: group.symmetric.get(tensor.untyped_storage(), 0)  # noqa: E731
    traits = replace(CpuBackend.traits, in_place=False, announces_offset=False)
    with mock.patch.multiple(CpuBackend, traits=traits, rendezvous_number=number):
        forget_routes()
        try:
            yield
        finally:
            forget_routes()


def gathered_in_place(me: Rank, as_gpu: bool) -> None:
    """Gather whole tensors, parts of them and tensors of more dimensions, in several dtypes. Results are exact."""
    with gpu_like(as_gpu):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            hollow = symm_overlap.empty(3, 0, 2, dtype=dtype, group=me.group)[2:]
            assert symm_overlap.all_gather(hollow, 0, me.group).shape == (me.world, 0, 2)
            whole = symm_overlap.empty(3, ROWS, COLUMNS, dtype=dtype, group=me.group)
            for path, chunks, streams in (("sequential", 1, 1), ("pipelined", 1, 1), ("pipelined", 2, 2)):
                with symm_overlap.force_path(path, chunks=chunks, streams=streams):
                    for number, A in enumerate((whole, whole[1], whole[2, 1:], whole[0])):
                        check_gather(me, A, as_gpu, seed=number)


def check_gather(me: Rank, A: Tensor, as_gpu: bool, seed: int) -> None:
    shards = [ref.binary(tuple(A.shape), A.dtype, seed=100 * seed + rank) for rank in range(me.world)]
    A.copy_(shards[me.rank])
    B, expected = ref.binary((COLUMNS, 3), A.dtype, seed=seed), torch.cat(shards)
    with recorded() as kinds:
        gathered, (product,) = symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=seed % 2 == 0)
        again = symm_overlap.all_gather(A, 0, me.group)
        A.fill_(7)  # allowed at once, because the peers have finished reading
    assert "publish" not in kinds
    assert ("announce" in kinds) is not as_gpu
    assert torch.equal(product, expected @ B)
    assert torch.equal(again, expected)
    assert gathered is None or torch.equal(gathered, expected)


@pytest.mark.parametrize("as_gpu", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_peers_read_it_where_it_lies(ranks: Pool, world: int, as_gpu: bool) -> None:
    ranks.run(world, gathered_in_place, as_gpu)


def at_different_places(me: Rank, compare: bool) -> str:
    tensor = symm_overlap.empty(4, COLUMNS, group=me.group).fill_(1)
    with gpu_like(True), comparing(compare), symm_overlap.lane(3 + compare), pytest.raises(RuntimeError) as raised:
        symm_overlap.all_gather(tensor[me.rank :][:2], 0, me.group)
    return str(raised.value)


def test_where_no_rank_can_tell_its_place_different_ones_are_an_error(fresh_ranks: Any) -> None:
    """If ranks cannot announce offsets, symmetric inputs at different offsets raise an error."""
    pool = fresh_ranks(2)
    for message in pool.run(2, at_different_places, True):
        assert "rank 1 calls all_gather((2, 4), gather_dim=0)" in message
        assert f"in symmetric memory of rendezvous 1, from element {COLUMNS}" in message
    for message in pool.run(2, at_different_places, False):
        assert "SYMM_OVERLAP_CHECK=1" in message


def like_torch(me: Rank) -> None:
    """All forms of torch.empty's arguments work, and the memory is torch's own symmetric memory."""
    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((2, 3), {}),
        (([2, 3],), {"dtype": torch.int8}),
        ((torch.Size([4]),), {"device": "cpu", "dtype": torch.bool}),
        (([],), {"requires_grad": True}),
        ((0, 5), {"device": torch.device("cpu")}),
    ]
    for size, options in forms:
        found, expected = symm_overlap.empty(*size, group=me.group, **options), torch.empty(*size, **options)
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(found, name) == getattr(expected, name)
        assert found.stride() == expected.stride()
        if me.world > 1 and found.numel():
            handle = symm_mem.rendezvous(found, me.group)
            assert handle.get_buffer(me.rank, (1,), found.dtype).data_ptr() == found.data_ptr()
    with symm_overlap.prepare():
        made = symm_overlap.empty(8, group=me.group)
        assert symm_overlap.all_gather(made, 0, me.group).shape == (8 * me.world,)
    assert type(made) is not Tensor, "inside prepare(), a new tensor has no data"


@pytest.mark.parametrize("world", [1, 2])
def test_it_takes_what_torch_empty_takes(ranks: Pool, world: int) -> None:
    ranks.run(world, like_torch)


def bad_arguments(me: Rank) -> None:
    for error, match, size, options in (
        (RuntimeError, "negative dimension", (-1,), {}),
        (TypeError, "empty", (1.5,), {}),
        (ValueError, "device is 'meta': allowed are cpu, cuda", (1,), {"device": "meta"}),
        (ValueError, "no process group is named 'nobody'", (1,), {"group": "nobody"}),
        (TypeError, "group must be a ProcessGroup", (1,), {"group": 7}),
    ):
        with pytest.raises(error, match=match):
            symm_overlap.empty(*size, **{"group": me.group, **options})
    with pytest.raises(ValueError, match="rank 0 brought 4194304 bytes, rank 1 brought 8388608"):
        symm_overlap.empty((me.rank + 1) << 20, dtype=torch.float32, group=me.group)
    capturing = mock.patch.object(CpuWorkspace, "require_preparable", side_effect=NotPreparedError)
    with capturing, pytest.raises(NotPreparedError):
        symm_overlap.empty(1, group=me.group)
    with mock.patch.dict(state_of(me.group).direct, cpu=False):
        ordinary = symm_overlap.empty(1, group=me.group)
    assert symm_mem.rendezvous(ordinary, me.group) is None
    symm_overlap.empty(1, group=me.group)  # the ranks are still in step


def test_bad_arguments_are_errors_on_every_rank(ranks: Pool) -> None:
    ranks.run(2, bad_arguments)
