"""Waits and looks beside other tasks and threads of a rank: each has its own deadline, and the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap import _C
from symm_overlap._torch import group_store
from symm_overlap.settings import current
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, in_thread, make
from tests.transforms import comparing


def by_task(me: Rank) -> None:
    _, handle = make(me.group, 1)

    def deadlines() -> tuple[int, float]:
        return _C.timeout_ms_or_default(0), current().seconds * 1000

    async def inside() -> None:
        with symm_overlap.timeout(0.05):
            await asyncio.sleep(0.1)
            assert deadlines() == (50, 50)
            assert await asyncio.to_thread(deadlines) == (50, 50), "the thread has the task's context"
            kind, _, seconds = error_of(handle.wait_signal, me.rank)
            assert (kind, seconds < SOON) == ("DistBackendError", True)

    async def outside() -> None:
        await asyncio.sleep(0.05)
        assert deadlines() == before, "another task is in a block"

    async def both() -> None:
        await asyncio.gather(inside(), outside())

    before = deadlines()
    asyncio.run(both())
    assert deadlines() == before


def look_at_a_peer_while_another_thread_is_in_the_store(me: Rank) -> None:
    """A store serves one request at a time. Whoever has to wait for it must not keep the threads of Python from going
    on: they may do what the request waits for.
    """
    group = dist.new_group()  # in which the peer is not known yet
    waiting = in_thread(lambda: error_of(group_store(group).wait, ["never"], timedelta(seconds=2)))
    time.sleep(0.2)
    looking = in_thread(_C.death_of, group.group_name, 1 - me.rank)
    start = time.monotonic()
    time.sleep(0.2)
    assert time.monotonic() - start < 1, "no other thread could go on"
    assert looking.is_alive(), "the look did not have to wait for the store"
    waiting.join()
    looking.join()


@contextmanager
def handling(handler: Callable[..., None]) -> Iterator[None]:
    """Let ``handler`` handle the signal of `meet_late`."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def meet_late(me: Rank) -> None:
    """Return at once on rank 0, to which a signal comes while it waits in its next call, and later on the others."""
    if me.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    else:
        time.sleep(0.6)


def call_in_a_signal_handler(me: Rank, lane: int, handlers: int) -> str:
    """Rank 0 waits for rank 1 in a call, in which a signal arrives whose handler makes a call on another lane."""

    def handler(*unused: object) -> None:
        with comparing(False), symm_overlap.lane(handlers):
            symm_overlap.all_reduce(ones, "sum", me.group)

    ones = torch.ones(4)
    with handling(handler), comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(10):
        symm_overlap.all_reduce(ones, "sum", me.group)
        meet_late(me)
        if me.rank == 1 and handlers != lane:
            handler()
        return error_of(symm_overlap.all_reduce, ones, "sum", me.group)[1]


@pytest.mark.parametrize("other", [False, True])
def test_a_signal_handler_may_call_on_another_lane_only(
    ranks: Pool, fresh_lane: Callable[[], int], other: bool
) -> None:
    lane = fresh_lane()
    mine, peers = ranks.run(2, call_in_a_signal_handler, lane, fresh_lane() if other else lane)
    if other:
        assert (mine, peers) == ("", "")
    else:
        assert f"in the middle of a call on lane {lane}, and begins another one there" in mine


def refused_in_a_signal_handler(me: Rank, lane: int) -> tuple[list[str], list[float]]:
    """The handler keeps the error to itself. The call that was interrupted goes on, and further ones follow."""
    refused: list[str] = []

    def handler(*unused: object) -> None:
        refused.append(error_of(symm_overlap.all_reduce, ones, "sum", me.group)[1])

    ones = torch.ones(4)
    with handling(handler), comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(10):
        symm_overlap.all_reduce(ones, "sum", me.group)
        meet_late(me)
        return refused, [symm_overlap.all_reduce(ones * n, "sum", me.group)[0].item() for n in range(4)]


def test_a_call_that_is_refused_in_a_signal_handler_does_not_count(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    (refused, mine), (none, peers) = ranks.run(2, refused_in_a_signal_handler, fresh_lane())
    assert (len(refused), none) == (1, [])
    assert "and begins another one there" in refused[0]
    assert mine == peers == [0, 2, 4, 6]


def first_call_in_a_signal_handler(me: Rank, handlers: int) -> str:
    """Rank 0 waits for rank 1 in the first call of a group, in which a signal arrives whose handler makes a call."""
    group = dist.new_group()

    def handler(*unused: object) -> None:
        with symm_overlap.lane(handlers):
            symm_overlap.all_reduce(torch.ones(4), "sum", group)

    with handling(handler), comparing(False), symm_overlap.timeout(10):
        meet_late(me)
        return error_of(symm_overlap.all_reduce, torch.ones(4), "sum", group)[1]


@pytest.mark.parametrize("lane", [0, 1])
def test_a_signal_handler_makes_no_call_during_the_first_one_of_its_group(
    fresh_ranks: Callable[..., Pool], lane: int
) -> None:
    mine, peers = fresh_ranks(2).run(2, first_call_in_a_signal_handler, lane)
    assert "in the middle of the first call of group" in mine
    assert "rank 0" in peers


def test_deadlines_of_blocks_belong_to_a_task(ranks: Pool) -> None:
    """Tasks of asyncio take turns on one thread."""
    ranks.run(1, by_task)


def test_a_look_at_a_peer_that_waits_for_the_store_lets_other_threads_go_on(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, look_at_a_peer_while_another_thread_is_in_the_store)
