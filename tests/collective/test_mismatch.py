"""If ranks make different calls, all of them soon raise an error, even without SYMM_OVERLAP_CHECK.

The error says that SYMM_OVERLAP_CHECK=1 shows both calls. The rule holds for calls that run a plan. The path c10d has
no signals that could tell peers what a rank calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.runtime import NotCapturedError, state_of
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.runtime.captures import captures_on_cpu
from tests.transforms import comparing, make_room

ops = torch.ops.symm_overlap
WORLD = 3
ADVICE = "SYMM_OVERLAP_CHECK=1"


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


Call = Callable[[Rank], object]


def gather(me: Rank, rows: int = 4, dtype: torch.dtype = torch.float32, dim: int = 0) -> object:
    return symm_overlap.all_gather(ones(rows, 4, dtype=dtype), dim, me.group)


def on_path(call: Call, path: str | None, chunks: int | None = None, span: int | None = None) -> Call:
    def run(me: Rank) -> object:
        with symm_overlap.force_path(path, chunks=chunks, span=span):
            return call(me)

    return run


def after_a_rejected_call(me: Rank) -> object:
    with pytest.raises(ValueError, match="gather_dim is 7"):
        gather(me, dim=7)
    return gather(me)


# The call of the odd rank, and the call of all others.
DIFFERENT: dict[str, tuple[Call, Call]] = {
    "shape": (lambda me: gather(me, 8), gather),
    "dtype": (lambda me: gather(me, dtype=torch.bfloat16), gather),
    "op": (lambda me: symm_overlap.all_reduce(ones(4, 4), "sum", me.group), gather),
    "dimension": (lambda me: gather(me, dim=1), gather),
    "reduce_op": (
        lambda me: symm_overlap.all_reduce(ones(4, 4), "sum", me.group),
        lambda me: symm_overlap.all_reduce(ones(4, 4), "avg", me.group),
    ),
    "path": (on_path(gather, "pipelined"), on_path(gather, "sequential")),
    "path that is not forced": (on_path(gather, "sequential"), gather),
    "chunks": (on_path(gather, "pipelined", 2), on_path(gather, "pipelined", 1)),
    "span": (on_path(gather, "pipelined", span=2), on_path(gather, "pipelined")),
    "a rejected call that the others skip": (after_a_rejected_call, gather),
    "a rejected call that it skips": (gather, after_a_rejected_call),
    "a larger workspace": (lambda me: gather(me, 1 << 18), gather),
    "prepare": (lambda me: make_room(me.group, 1 << 24), gather),
}


def call_and_go_on(me: Rank, call: Call) -> None:
    """Call twice: the first call may already have all its data before the odd rank arrives. The second cannot."""
    call(me)
    gather(me)


def different_calls(me: Rank, what: str, odd: int, lane: int, warm: bool) -> tuple[str, float]:
    with comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(60):
        for _ in range(3 * warm):
            gather(me)
        start = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            call_and_go_on(me, DIFFERENT[what][me.rank != odd])
        took = time.monotonic() - start
        with pytest.raises(RuntimeError, match="out of step"):
            gather(me)
    assert isinstance(raised.value, dist.DistBackendError)
    return str(raised.value), took


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_raises_soon_and_says_what_shows_more(
    ranks: Pool, fresh_lane: Callable[[], int], what: str, odd: int, warm: bool
) -> None:
    """Every rank raises soon, and its message recommends SYMM_OVERLAP_CHECK=1."""
    for message, seconds in ranks.run(WORLD, different_calls, what, odd, fresh_lane(), warm, timeout=15):
        assert seconds < SOON, message
        assert ADVICE in message


def one_compares(me: Rank, odd: int, compares: bool) -> tuple[str, float]:
    """Make the first call of a group, in which the ranks compare the settings that they must share."""
    group = dist.new_group(list(range(me.world)))
    start = time.monotonic()
    with comparing((me.rank == odd) == compares), symm_overlap.timeout(60), pytest.raises(RuntimeError) as raised:
        symm_overlap.all_gather(ones(4, 4), 0, group)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_compare_calls_and_ranks_that_do_not_are_told(ranks: Pool, odd: int, compares: bool) -> None:
    for message, seconds in ranks.run(5, one_compares, odd, compares, timeout=15):  # new_group is for all ranks
        assert seconds < SOON
        assert "compares calls (SYMM_OVERLAP_CHECK=1) and rank" in message
        assert "does not: set it to the same value on every rank" in message


def with_captures_of_its_own(me: Rank, lane: int, path: str) -> None:
    """Rank 0 captures calls, some are rejected, and it throws the graphs away. Its peers do not know of them."""
    with comparing(False), symm_overlap.lane(lane), symm_overlap.force_path(path):
        for rows in (1, 2, 3):
            if me.rank == 0:
                with captures_on_cpu():
                    gather(me)
                with captures_on_cpu(prepared=False), pytest.raises(NotCapturedError):
                    gather(me)
            found = symm_overlap.all_gather(ones(rows, 4), 0, me.group)
            assert torch.equal(found, ones(rows * me.world, 4))


@pytest.mark.parametrize("path", ["sequential", "pipelined"])
def test_calls_that_one_rank_has_only_captured_do_not_count(
    ranks: Pool, fresh_lane: Callable[[], int], path: str
) -> None:
    ranks.run(2, with_captures_of_its_own, fresh_lane(), path)


def captured_collectives(me: Rank, lane: int) -> list[int]:
    counts, calls = [], state_of(me.group).calls
    with symm_overlap.lane(lane), symm_overlap.force_path("c10d"):
        for _ in range(2):
            gather(me)
            counts.append(calls[lane])
            with captures_on_cpu():
                gather(me)
            with captures_on_cpu(prepared=False), pytest.raises(NotCapturedError, match="cannot be captured"):
                gather(me)
            counts.append(calls[lane])
    return counts


def test_captured_collectives_of_the_library_do_not_count(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    assert ranks.run(2, captured_collectives, fresh_lane()) == [[1, 1, 2, 2]] * 2
