"""All-gathers and reduce-scatters through slots are right in every dtype, from any memory, and in rank order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from symm_overlap import timeout
from symm_overlap.fsdp.communication.collectives import SUMMED, all_gather, reduce_scatter
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.settings import current, transformed
from tests.fsdp.trained import premultiplied_sum
from tests.ranks import Pool, Rank

SIZES = (1, 3, 1000, 0, 70_001)


def slots_of(me: Rank, op: str, way: str = "program") -> Slots:
    """Return two slots, whose plans a compiled program or Python issues."""
    with transformed() if way == "program" else transformed(lambda plan, table: table):
        return Slots(op, me.group, me.device, 2, current())


def numbers(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    made = torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def gathers(me: Rank, way: str) -> None:
    slots = slots_of(me, "gather", way)
    for call, (dtype, numel) in enumerate(
        (dtype, numel) for dtype in (*SUMMED, torch.uint8, torch.int64, torch.bool) for numel in SIZES
    ):
        shards = [numbers(100 * call + rank, numel, dtype) for rank in range(me.world)]
        expected = torch.cat(shards)
        kind = call % 3
        if kind == 0 and numel:  # in place, as FSDP2 does
            output = slots.allocate((me.world * numel,), dtype)
            output.fill_(1)
            mine = output.chunk(me.world)[me.rank].copy_(shards[me.rank])
        else:  # outside of the slots; with kind 1 in place
            output = torch.ones(me.world * numel, dtype=dtype)
            mine = output[me.rank * numel : (me.rank + 1) * numel].copy_(shards[me.rank])
            mine = mine if kind == 1 else shards[me.rank].clone()
        all_gather(slots, output, mine)
        assert torch.equal(output, expected), (dtype, numel, kind)
        assert torch.equal(mine, shards[me.rank])


@pytest.mark.parametrize(("world", "way"), [(2, "program"), (3, "program"), (4, "program"), (3, "Python")])
def test_a_gather_has_every_shard_in_rank_order(ranks: Pool, world: int, way: str) -> None:
    ranks.run(world, gathers, way)


def gathers_elsewhere(me: Rank) -> None:
    """Gather into a slot from an input that is not the local part of the slot."""
    slots = slots_of(me, "gather")
    for call in range(5):
        shards = [numbers(100 * call + rank, 50, torch.float32) for rank in range(me.world)]
        output = slots.allocate((me.world * 50,), torch.float32).fill_(float("nan"))
        all_gather(slots, output, shards[me.rank])
        assert torch.equal(output, torch.cat(shards))


def test_the_own_shard_may_lie_elsewhere(ranks: Pool) -> None:
    ranks.run(3, gathers_elsewhere)


def reduces(me: Rank, way: str) -> None:
    slots, call = slots_of(me, "reduce", way), 0
    premultiplied = premultiplied_sum(0.25)
    for dtype in SUMMED:
        for op, scale in (
            (dist.ReduceOp.SUM, 1.0),
            (dist.ReduceOp.AVG, 1 / me.world),
            (dist.ReduceOp(dist.ReduceOp.AVG), 1 / me.world),
            (premultiplied, 0.25),
        ):
            if op is premultiplied and dtype == torch.float16:
                continue
            for numel in SIZES:
                call += 1
                inputs = [numbers(100 * call + rank, me.world * numel, dtype) for rank in range(me.world)]
                mine = inputs[me.rank]
                if numel and call % 2:
                    mine = slots.allocate(mine.shape, dtype).copy_(mine)
                output = torch.full((numel,), 99, dtype=dtype)
                reduce_scatter(slots, output, mine, op)
                parts = [each.double()[me.rank * numel : (me.rank + 1) * numel] for each in inputs]
                expected = (torch.stack(parts).sum(0) * scale).to(dtype)
                torch.testing.assert_close(output, expected)
                assert torch.equal(mine, inputs[me.rank]), "the input must not change"


@pytest.mark.parametrize(("world", "way"), [(2, "program"), (3, "program"), (3, "Python")])
def test_a_reduce_scatter_sums_averages_and_scales(ranks: Pool, world: int, way: str) -> None:
    ranks.run(world, reduces, way)


def sums_in_float32(me: Rank, dtype: torch.dtype) -> None:
    """Sum 1 and several halves of its last place. If sums were rounded to ``dtype``, each addition would be lost."""
    eps = torch.finfo(dtype).eps
    value = 1.0 if me.rank == 0 else eps / 2
    slots, output = slots_of(me, "reduce"), torch.empty(3, dtype=dtype)
    reduce_scatter(slots, output, torch.full((3 * me.world,), value, dtype=dtype), dist.ReduceOp.SUM)
    assert torch.equal(output, torch.full((3,), 1 + 2 * eps, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(ranks: Pool, dtype: torch.dtype) -> None:
    ranks.run(5, sums_in_float32, dtype)


def sums_in_rank_order(me: Rank) -> None:
    slots, output = slots_of(me, "reduce"), torch.empty(100)
    seeds = [torch.Generator().manual_seed(rank) for rank in range(me.world)]
    inputs = [torch.randn(me.world * 100, generator=seed) * 10.0**rank for rank, seed in enumerate(seeds)]
    reduce_scatter(slots, output, inputs[me.rank], dist.ReduceOp.SUM)
    expected = torch.zeros(100)
    for each in inputs:
        expected = expected + each[me.rank * 100 : (me.rank + 1) * 100]
    assert torch.equal(output, expected), "the inputs must be added one after another, in rank order"


def test_gradients_are_added_in_rank_order(ranks: Pool) -> None:
    ranks.run(4, sums_in_rank_order)


WRONG: tuple[tuple[str, tuple[int, ...], int, torch.dtype, Any, str], ...] = (
    ("gather", (6,), 4, torch.float32, None, "as large as input"),
    ("gather", (8,), 4, torch.float64, None, "one dtype"),
    ("gather", (8,), 4, torch.bfloat16, None, "one dtype"),
    ("gather", (2, 8), 4, torch.float32, None, "contiguous"),
    ("reduce", (6,), 4, torch.float32, dist.ReduceOp.SUM, "as large as output"),
    ("reduce", (8,), 4, torch.float32, dist.ReduceOp.MAX, "with MAX"),
    ("reduce", (8,), 4, torch.int64, dist.ReduceOp.SUM, "reduce-scatter of torch.int64"),
    ("reduce", (8,), 4, torch.float16, "premultiplied", "float16"),
)


def wrong_on_one_rank(me: Rank, case: int) -> str:
    op, large, small, dtype, reduction, _ = WRONG[case]
    slots = slots_of(me, op)
    if reduction == "premultiplied":
        reduction = premultiplied_sum(0.5)
    right = me.rank == 0
    one = torch.zeros(8, dtype=torch.float32) if right else torch.zeros(large, dtype=dtype)
    if len(large) == 2 and not right:
        one = one.T[:, 0].repeat(2)[::2]  # eight elements that are not contiguous
    other_dtype = torch.float32 if right or op == "gather" else dtype
    other = torch.zeros(4 if right else small, dtype=other_dtype)
    if op == "gather":
        call = partial(all_gather, slots, one, other)
    else:
        call = partial(reduce_scatter, slots, other, one, dist.ReduceOp.SUM if right else reduction)
    with timeout(20), pytest.raises((ValueError, TypeError, dist.DistBackendError)) as raised:
        call()
    with pytest.raises(RuntimeError, match=r"out of step.*apply\(model\) again"):
        slots.allocate((8,), torch.float32)
    return str(raised.value)


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_is_wrong_on_one_rank_is_an_error_on_both(ranks: Pool, case: int) -> None:
    right, wrong = ranks.run(2, wrong_on_one_rank, case)
    assert WRONG[case][-1] in wrong
    assert "rank 1" in right
