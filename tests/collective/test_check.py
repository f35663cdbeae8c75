"""With SYMM_OVERLAP_CHECK=1, ranks that make different calls all raise an error at once and can go on afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap._torch import group_store
from tests.collective import reference as ref
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.transforms import comparing

ops = torch.ops.symm_overlap
WORLD = 3


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


Call = Callable[[str], object]

USUAL: Call = lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, name)  # noqa: E731

# The call of one rank while the others make the usual call, and the text that must describe it in the message.
DIFFERENT: dict[str, tuple[Call, str]] = {
    "shape": (lambda name: ops.fused_all_gather_matmul(ones(3, 6), [ones(6, 5)], 0, name), "(3, 6), weights=1"),
    "number of weights": (
        lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)] * 2, 0, name),
        "weights=2",
    ),
    "dtype": (lambda name: ops.fused_all_gather_matmul(ones(4, 6).double(), [ones(6, 5).double()], 0, name), "float64"),
    "dimension": (lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(18, 5)], 1, name), "gather_dim=1"),
    "return_A": (
        lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, name, return_A=False),
        "return_A=False",
    ),
    "all_gather": (lambda name: ops.all_gather(ones(4, 6), 0, name), "all_gather((4, 6)"),
    "matmul_reduce_scatter": (
        lambda name: ops.fused_matmul_reduce_scatter(ones(6, 6), ones(6, 5), "avg", 0, name),
        "matmul_reduce_scatter(product=(6, 5), reduce_op=avg",
    ),
    "matmul_all_reduce": (
        lambda name: ops.fused_matmul_all_reduce(ones(4, 6), ones(6, 5), "sum", name),
        "matmul_all_reduce(",
    ),
    "reduce_scatter": (
        lambda name: ops.reduce_scatter(ones(6, 6), "sum", 1, name),
        "reduce_scatter((6, 6), reduce_op=sum, scatter_dim=1",
    ),
    "all_reduce": (lambda name: ops.all_reduce(ones(4, 6), "sum", name), "all_reduce((4, 6), reduce_op=sum)"),
    "all_gather_weight_grad": (lambda name: ops.all_gather_weight_grad(ones(4, 6), [ones(12, 5)], 0, name), "gradient"),
    "all_gather_weight_matmul": (
        lambda name: ops.fused_all_gather_weight_matmul(ones(2, 6), ones(4, 6), 0, True, name),
        "all_gather_weight_matmul((4, 6), gather_dim=0, transpose=True)",
    ),
    "weight_grad_reduce_scatter": (
        lambda name: ops.weight_grad_reduce_scatter(ones(2, 6), ones(2, 6), "avg", 1, name),
        "weight_grad_reduce_scatter((6, 6), reduce_op=avg, scatter_dim=1)",
    ),
    "path": (lambda name: on_path("pipelined", lambda: USUAL(name)), "pipelined"),
}


def on_path(path: str, call: Callable[[], object]) -> object:
    with symm_overlap.force_path(path):
        return call()


def good(me: Rank) -> None:
    """Make a correct call and compare its result exactly."""
    A, B = ref.binary((4, 6), torch.float32, seed=me.rank), ref.binary((6, 5), torch.float32, seed=9)
    whole = torch.cat([ref.binary((4, 6), torch.float32, seed=rank) for rank in range(me.world)])
    torch.testing.assert_close(ops.fused_all_gather_matmul(A, [B], 0, me.group_name)[1][0], whole @ B, rtol=0, atol=0)


@comparing(True)
def call_differently(me: Rank, odd: int, what: str) -> tuple[str, float]:
    call, _ = DIFFERENT[what]
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        (call if me.rank == odd else USUAL)(me.group_name)
    took = time.monotonic() - start
    good(me)
    return str(raised.value), took


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_raises_and_names_the_two_that_differ(ranks: Pool, what: str) -> None:
    for odd in (0, 2):
        first, second = (0, 1) if odd == 0 else (0, 2)
        for message, seconds in ranks.run(WORLD, call_differently, odd, what):
            assert seconds < SOON
            assert "make different calls" in message
            assert f"rank {first} calls" in message
            assert f"rank {second} calls" in message
            usual, different = (second, first) if odd == 0 else (first, second)
            assert "all_gather_matmul((4, 6), weights=1" in said_by(usual, message)
            assert DIFFERENT[what][1] in said_by(different, message)


def said_by(rank: int, message: str) -> str:
    """Return the part of the message that describes the call of this rank."""
    return message.split(f"rank {rank} calls ")[1].split("rank ")[0]


# Calls that one rank rejects while the others make the usual call: its error, and the text in the others' message.
REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "columns": (
        lambda name: ops.fused_all_gather_matmul(ones(4, 7), [ones(6, 5)], 0, name),
        ValueError,
        "fused_all_gather_matmul with arguments that it rejects (ValueError: Bs[0] of shape (6, 5) does not match",
    ),
    "dtypes": (
        lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5).double()], 0, name),
        TypeError,
        "rejects (TypeError: Bs[0] is torch.float64",
    ),
    "scatter size": (
        lambda name: ops.fused_matmul_reduce_scatter(ones(7, 6), ones(6, 5), "sum", 0, name),
        ValueError,
        "fused_matmul_reduce_scatter with arguments that it rejects (ValueError: scatter_dim 0",
    ),
    "reduce_op": (
        lambda name: ops.fused_matmul_all_reduce(ones(4, 6), ones(6, 5), "max", name),
        ValueError,
        "rejects (ValueError: reduce_op is 'max'",
    ),
    "dimension": (lambda name: ops.all_gather(ones(4, 6), 2, name), ValueError, "rejects (ValueError: gather_dim is 2"),
    "wrapper": (
        lambda name: symm_overlap.all_gather_matmul(ones(4, 7), [ones(6, 5)], 0, name),
        ValueError,
        "rejects (ValueError: Bs[0]",
    ),
    "wrapper's dimension": (
        lambda name: symm_overlap.all_gather_matmul(ones(4, 6), [ones(6, 5)], 2, name),
        ValueError,
        "rejects (ValueError: gather_dim is 2",
    ),
    "wrapper's save": (
        lambda name: symm_overlap.all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, name, save="all"),
        ValueError,
        "all_gather_matmul with arguments that it rejects (ValueError: save is 'all'",
    ),
    "type": (
        lambda name: symm_overlap.matmul_reduce_scatter(ones(6, 6), ones(6, 5), "sum", 0.5, name),
        TypeError,
        "matmul_reduce_scatter with arguments that it rejects (TypeError: symm_overlap::fused_matmul_reduce_scatter()",
    ),
    "no tensor": (
        lambda name: symm_overlap.all_gather_matmul(ones(4, 6), None, 0, name),
        TypeError,
        "rejects (TypeError: 'NoneType' object is not iterable",
    ),
}


@comparing(True)
def one_refuses(me: Rank, odd: int, what: str, fresh: bool) -> tuple[str, float]:
    call, error, _ = REFUSED[what]
    if fresh:  # in its first call, a group also compares settings
        group = dist.new_group(list(range(me.world)))
        me = replace(me, group=group)
    start = time.monotonic()
    if me.rank == odd:
        with pytest.raises(error) as raised:
            call(me.group_name)
    else:
        with pytest.raises(RuntimeError, match="make different calls") as raised:
            USUAL(me.group_name)
    took = time.monotonic() - start
    good(me)
    return str(raised.value), took


@pytest.mark.parametrize(("what", "fresh"), [*((what, False) for what in REFUSED), ("columns", True), ("type", True)])
def test_a_rank_that_refuses_its_arguments_does_not_leave_the_others_waiting(
    ranks: Pool, what: str, fresh: bool
) -> None:
    world = 5 if fresh else WORLD  # new_group is for all ranks of the pool
    for rank, (message, seconds) in enumerate(ranks.run(world, one_refuses, 2, what, fresh)):
        assert seconds < SOON
        if rank != 2:
            assert "all_gather_matmul((4, 6), weights=1" in said_by(0, message)
            assert REFUSED[what][2] in message.split("rank 2 calls ")[1]


@comparing(True)
def call_three_ways(me: Rank) -> str:
    rows = 2 * (me.rank + 1)
    with pytest.raises(RuntimeError, match="make different calls") as raised:
        ops.all_gather(ones(rows, 6), 0, me.group_name)
    good(me)
    return str(raised.value)


def test_of_several_that_differ_every_rank_names_the_same_two(ranks: Pool) -> None:
    """If several ranks differ, all messages are equal and name the same two ranks."""
    messages = ranks.run(WORLD, call_three_ways)
    assert len(set(messages)) == 1
    assert "rank 0 calls all_gather((2, 6)" in messages[0]
    assert "rank 1 calls all_gather((4, 6)" in messages[0]


@comparing(True)
def call_differently_on_a_lane(me: Rank) -> None:
    for _ in range(3):
        with symm_overlap.lane(1), pytest.raises(RuntimeError, match=r"make different calls \(lane 1"):
            ops.all_gather(ones(2 + me.rank, 6), 0, me.group_name)
        good(me)
        with symm_overlap.lane(1):
            good(me)


def test_each_lane_is_checked_by_itself(ranks: Pool) -> None:
    ranks.run(WORLD, call_differently_on_a_lane)


@comparing(True)
def keys_left_in_the_store(me: Rank) -> int:
    good(me)  # the first call leaves permanent keys, with facts about the ranks
    before = group_store(me.group).num_keys()
    for _ in range(20):
        good(me)
    return group_store(me.group).num_keys() - before


def test_checking_does_not_fill_the_store(ranks: Pool) -> None:
    assert max(ranks.run(WORLD, keys_left_in_the_store)) <= 4 * WORLD
