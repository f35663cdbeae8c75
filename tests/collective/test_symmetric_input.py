"""Peers read an input in the group's symmetric memory in place: it is not published, and no read of it is ever torn."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import symm_overlap
from symm_overlap.plan import Plan, Table
from symm_overlap.plan.testing import delayed
from symm_overlap.settings import transformed
from tests.collective import reference as ref
from tests.ranks import Pool, Rank
from tests.transforms import comparing, recorded

ops = torch.ops.symm_overlap
ROWS, COLUMNS = 6, 4


def symmetric(me: Rank, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = symm_mem.empty(*shape, dtype=dtype, device="cpu")
    symm_mem.rendezvous(tensor, me.group_name)
    return tensor


def inputs(world: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    return [ref.binary(shape, dtype, seed=1000 * seed + rank) for rank in range(world)]


def gather(me: Rank, A: Tensor, dim: int, expected: Tensor, seed: int) -> None:
    """Call all-gather-matmul on a shard, with or without the gathered tensor, and compare the results exactly."""
    rows = A.shape[-1] * (me.world if dim == A.dim() - 1 else 1)
    B = ref.binary((rows, 5), A.dtype, seed=seed)
    gathered, (product,) = ops.fused_all_gather_matmul(A, [B], dim, me.group_name, return_A=seed % 2 == 0)
    torch.testing.assert_close(product, expected @ B, rtol=0, atol=0)
    if gathered is not None:
        torch.testing.assert_close(gathered, expected, rtol=0, atol=0)


def calls(me: Rank, dtype: torch.dtype, path: str, chunks: int, streams: int) -> None:
    A = symmetric(me, ROWS, COLUMNS, dtype=dtype)
    with symm_overlap.force_path(path, chunks=chunks, streams=streams):
        for dim in (0, 1):
            for number in range(4):
                shards = inputs(me.world, (ROWS, COLUMNS), dtype, seed=number)
                A.copy_(shards[me.rank])
                with recorded() as kinds:
                    gather(me, A, dim, torch.cat(shards, dim), seed=number)
                    torch.testing.assert_close(
                        ops.all_gather(A, dim, me.group_name), torch.cat(shards, dim), rtol=0, atol=0
                    )
                assert "publish" not in kinds
                assert {"signal", "wait"} <= set(kinds)
                with recorded() as kinds:
                    gather(me, A.clone(), dim, torch.cat(shards, dim), seed=number)
                assert "publish" in kinds


@pytest.mark.parametrize("how", [("sequential", 1, 1), ("pipelined", 1, 1), ("pipelined", 2, 2)], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_symmetric_input_is_read_in_place_and_another_is_published(
    ranks: Pool, world: int, how: tuple[str, int, int]
) -> None:
    ranks.run(world, calls, torch.float32, *how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_in_every_dtype(ranks: Pool, dtype: torch.dtype) -> None:
    ranks.run(2, calls, dtype, "pipelined", 2, 1)


def parts_of_one_buffer(me: Rank) -> None:
    """Each rank has its shard at a different offset, as when a whole tensor is gathered in place."""
    whole = symmetric(me, me.world * ROWS, COLUMNS)
    for number in range(4):
        shards = inputs(me.world, (ROWS, COLUMNS), torch.float32, seed=number)
        whole.fill_(-1)
        mine = whole[((me.rank + number) % me.world) * ROWS :][:ROWS]
        mine.copy_(shards[me.rank])
        with recorded() as kinds:
            gather(me, mine, 0, torch.cat(shards), seed=number)
        assert "publish" not in kinds


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_keep_their_shards_at_different_offsets(ranks: Pool, world: int) -> None:
    ranks.run(world, parts_of_one_buffer)


def not_as_it_is(me: Rank) -> None:
    shards = inputs(me.world, (ROWS, COLUMNS), torch.float32, seed=1)
    turned = symmetric(me, COLUMNS, ROWS).t().copy_(shards[me.rank])  # copied first: not contiguous
    unmet = symm_mem.empty(ROWS, COLUMNS, dtype=torch.float32, device="cpu").copy_(shards[me.rank])
    others = symm_mem.empty(ROWS, COLUMNS, dtype=torch.float32, device="cpu").copy_(shards[me.rank])
    symm_mem.rendezvous(others, me.groups[0, 1, 2].group_name)
    for A in (turned, unmet, others):
        with recorded() as kinds:
            gather(me, A, 0, torch.cat(shards), seed=1)
        assert "publish" in kinds


def of_another_group(me: Rank) -> None:
    if me.rank == 2:  # takes part only in the rendezvous of the larger group
        others = symm_mem.empty(ROWS, COLUMNS, dtype=torch.float32, device="cpu")
        symm_mem.rendezvous(others, me.group_name)
    else:
        not_as_it_is(Rank(me.rank, 2, me.groups[0, 1], me.device, me.groups))


def test_symmetric_memory_that_peers_cannot_use_as_it_is_is_published(ranks: Pool) -> None:
    ranks.run(3, of_another_group)


@comparing(True)
def on_one_rank_only(me: Rank) -> str:
    shards = inputs(me.world, (ROWS, COLUMNS), torch.float32, seed=1)
    A = symmetric(me, ROWS, COLUMNS).copy_(shards[me.rank])
    with pytest.raises(RuntimeError, match="make different calls") as raised:
        gather(me, A if me.rank == 1 else A.clone(), 0, torch.cat(shards), seed=1)
    gather(me, A, 0, torch.cat(shards), seed=1)
    return str(raised.value)


def test_checking_finds_ranks_of_which_only_some_bring_symmetric_memory(ranks: Pool) -> None:
    for message in ranks.run(3, on_one_rank_only):
        assert "in symmetric memory" in message.split("rank 1 calls ")[1]
        assert "in symmetric memory" not in message.split("rank 1 calls ")[0]


@comparing(True)
def of_another_tensor_on_one_rank(me: Rank) -> str:
    shards = inputs(me.world, (ROWS, COLUMNS), torch.float32, seed=1)
    mine, other = (symmetric(me, ROWS, COLUMNS).copy_(shards[me.rank]) for _ in range(2))
    with pytest.raises(RuntimeError, match="make different calls") as raised:
        gather(me, other if me.rank == 1 else mine, 0, torch.cat(shards), seed=1)
    gather(me, other, 0, torch.cat(shards), seed=1)
    return str(raised.value)


def test_checking_finds_ranks_that_bring_different_symmetric_tensors(ranks: Pool) -> None:
    for message in ranks.run(3, of_another_tensor_on_one_rank):
        first, second = re.findall(r"in symmetric memory of rendezvous (\d+)", message)
        assert int(second) == int(first) + 1


def torn_calls(me: Rank, wait_for_readers: bool, lane: int) -> list[int]:
    """Count wrong results of either op when peers read late and the input is overwritten as soon as a call returns."""
    A, eye, wrong = symmetric(me, ROWS, COLUMNS), torch.eye(COLUMNS), [0, 0]

    def late_readers(seed: int, plan: Plan, table: Table) -> Table:
        slow = delayed(table, seed, plan.rank, 1e-3)
        if not wait_for_readers:
            slow["wait"] = lambda step: None if step.label == "[done]" else table["wait"](step)
        return {**slow, "signal": table["signal"]}

    # Comparing calls would synchronise the ranks before every call.
    with comparing(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=2, streams=2):
        for number in range(40):
            shards = inputs(me.world, (ROWS, COLUMNS), torch.float32, seed=number)
            A.copy_(shards[me.rank])
            with transformed(partial(late_readers, number)):
                if number % 2:  # peers copy the input
                    found = ops.all_gather(A, 0, me.group_name)
                else:  # peers multiply the input in place
                    _, (found,) = ops.fused_all_gather_matmul(A, [eye], 0, me.group_name, return_A=False)
            wrong[number % 2] += not torch.equal(found, torch.cat(shards))
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_an_input_overwritten_after_the_call_is_never_torn(
    ranks: Pool, fresh_lane: Callable[[], int], world: int
) -> None:
    assert ranks.run(world, torn_calls, True, fresh_lane()) == [[0, 0]] * world


def test_it_would_be_torn_if_the_call_did_not_wait_for_its_readers(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    found = ranks.run(3, torn_calls, False, fresh_lane())
    assert all(sum(wrong) for wrong in zip(*found, strict=True)), found
