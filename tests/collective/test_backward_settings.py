"""A backward pass uses each setting of a block around ``backward()`` or, if none sets it, that of the forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.settings import Settings, applied, current, in_backward
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.transforms import choices, comparing


def loss_of(me: Rank) -> torch.Tensor:
    A = torch.ones(2 * me.world, 4, requires_grad=True)
    return symm_overlap.matmul_reduce_scatter(A, torch.ones(4, 3), "sum", 0, me.group).sum()


def deadline_around_backward(me: Rank, lane: int) -> float:
    """Rank 1 never makes the call of the backward pass."""
    with comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(60):
        loss = loss_of(me)
        loss_of(me).backward()  # does all one-time work
    if me.rank == 1:
        return 0.0
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"), symm_overlap.timeout(0.5):
        loss.backward()
    return time.monotonic() - start


def test_a_deadline_around_backward_wins_over_the_forwards(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    took, _ = ranks.run(2, deadline_around_backward, fresh_lane())
    assert 0.4 < took < SOON


def deadline_of_forward(me: Rank, lane: int) -> float:
    with comparing(False), symm_overlap.lane(lane):
        loss_of(me).backward()
        with symm_overlap.timeout(0.5):
            loss = loss_of(me)
    if me.rank == 1:
        return 0.0
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        loss.backward()
    return time.monotonic() - start


def test_without_a_block_around_backward_the_forwards_deadline_holds(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    took, _ = ranks.run(2, deadline_of_forward, fresh_lane())
    assert 0.4 < took < SOON


def backward_in_blocks(me: Rank, lanes: tuple[int, int], thread: str) -> list[tuple[str, int]]:
    """Return the path and the number of chunks of the one call in the backward pass."""
    with symm_overlap.lane(lanes[0]), symm_overlap.force_path("sequential"), symm_overlap.timeout(40):
        loss = loss_of(me)
    with choices() as made:
        if thread == "same thread":
            with symm_overlap.lane(lanes[1]), symm_overlap.force_path("pipelined", chunks=2):
                loss.backward()
        elif thread == "another thread":

            def run() -> None:
                with symm_overlap.force_path("c10d"):
                    loss.backward()

            in_thread(run)
        else:
            in_thread(loss.backward)
        return [(choice.path, choice.chunks) for _, choice in made]


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("thread", "expected"),
    [
        ("same thread", ("pipelined", 2)),
        ("another thread", ("c10d", 1)),
        ("another thread without a block", ("sequential", 1)),
    ],
)
def test_blocks_around_backward_win_and_a_thread_that_has_none_keeps_the_forwards(
    ranks: Pool, fresh_lane: Callable[[], int], thread: str, expected: tuple[str, int]
) -> None:
    lanes = (fresh_lane(), fresh_lane())
    assert ranks.run(2, backward_in_blocks, lanes, thread) == [[expected]] * 2


def backward_on_a_lane(me: Rank, forward: int, backward: int | None) -> list[int]:
    """Return how many calls each lane has made after the backward pass."""
    from symm_overlap.runtime import state_of

    with symm_overlap.lane(forward), symm_overlap.force_path("pipelined"):
        loss = loss_of(me)
    with applied(replace(current(), lane=backward)):
        loss.backward()
    lanes = [forward] if backward is None else [forward, backward]
    return [state_of(me.group).lane(me.group, me.device, lane).calls for lane in lanes]


def test_a_lane_around_backward_wins_over_the_forwards(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    assert ranks.run(2, backward_on_a_lane, fresh_lane(), fresh_lane()) == [[1, 1]] * 2
    assert ranks.run(2, backward_on_a_lane, fresh_lane(), None) == [[2]] * 2


class Nested(torch.autograd.Function):
    """Runs a backward pass inside of a backward pass, and so on, until autograd takes another thread. It calls
    ``function`` there.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.thread, ctx.function = threading.get_ident(), function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.thread != threading.get_ident():
            ctx.function()
        else:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.function).backward()
        return grad, None


def on_a_thread_of_autograd(me: Rank, lanes: tuple[int, int]) -> list[int]:
    """Return how many calls each lane has made. A backward pass of compiled code calls ops in such a way."""
    from symm_overlap.runtime import state_of

    threads = []

    def call() -> None:
        threads.append(threading.get_ident())
        with torch.no_grad():
            torch.ops.symm_overlap.all_reduce.compiled(torch.ones(4), "sum", me.group_name, note="")

    with symm_overlap.force_path("pipelined"), symm_overlap.lane(lanes[0]):
        call()
        with symm_overlap.lane(lanes[1]):
            Nested.apply(torch.ones(1, requires_grad=True), call).backward()
        call()
    assert len(set(threads)) == 2
    return [state_of(me.group).lane(me.group, me.device, lane).calls for lane in lanes]


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="threads of autograd do not know the caller's blocks in torch 2.11"
)
def test_compiled_code_on_a_thread_of_autograd_has_the_settings_around_backward(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    assert ranks.run(2, on_a_thread_of_autograd, (fresh_lane(), fresh_lane())) == [[2, 1]] * 2


def test_what_a_block_has_not_set_is_the_forwards() -> None:
    forward = Settings(path="pipelined", chunks=3, timeout=5.0, lane=4, compare=True)
    with applied(Settings(timeout=2.0, lane=0, compare=False)):
        assert in_backward(forward) == Settings(path="pipelined", chunks=3, timeout=2.0, lane=0, compare=False)
    assert in_backward(forward) == forward
