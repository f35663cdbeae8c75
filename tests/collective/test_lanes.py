"""Ops in flight at the same time, on lanes of one group and on overlapping groups, do not disturb one another."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from symm_overlap.runtime import state_of
from symm_overlap.settings import current
from tests.collective import reference as ref
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing, comparing_in_threads

ops = torch.ops.symm_overlap


def shards(world: int, rows: int, columns: int, seed: int) -> list[Tensor]:
    """Return every rank's input. Every rank knows all inputs, so it can compute the expected result alone."""
    return [ref.binary((rows, columns), torch.float32, seed=1000 * seed + rank) for rank in range(world)]


def gather(group: dist.ProcessGroup, rows: int, seed: int) -> None:
    inputs, B = shards(group.size(), rows, 8, seed), ref.binary((8, 5), torch.float32, seed=seed)
    _, (product,) = ops.fused_all_gather_matmul(inputs[group.rank()], [B], 0, group.group_name, return_A=seed % 2 == 0)
    torch.testing.assert_close(product, torch.cat(inputs) @ B, rtol=0, atol=0)


def scatter(group: dist.ProcessGroup, rows: int, seed: int) -> None:
    world, rank = group.size(), group.rank()
    inputs, B = shards(world, rows * world, 8, seed), ref.binary((8, 5), torch.float32, seed=seed)
    part = ops.fused_matmul_reduce_scatter(inputs[rank], B, "sum", 0, group.group_name)
    expected = sum(A @ B for A in inputs)[rank * rows : (rank + 1) * rows]
    torch.testing.assert_close(part, expected, rtol=0, atol=0)


def reduce(group: dist.ProcessGroup, rows: int, seed: int) -> None:
    inputs, B = shards(group.size(), rows, 8, seed), ref.binary((8, 5), torch.float32, seed=seed)
    found = ops.fused_matmul_all_reduce(inputs[group.rank()], B, "sum", group.group_name)
    torch.testing.assert_close(found, sum(A @ B for A in inputs), rtol=0, atol=0)


OPS: Sequence[Callable[[dist.ProcessGroup, int, int], None]] = (gather, scatter, reduce)


def calls(group: dist.ProcessGroup, lane: int, seed: int, count: int, path: str = "pipelined") -> None:
    """Make the calls of one lane, the same on every rank. A large call in the middle makes the workspace grow."""
    order = random.Random(f"{group.group_name} {lane} {seed}")
    torch.set_num_threads(1)
    with symm_overlap.lane(lane), symm_overlap.timeout(20):
        for number in range(count):
            op, rows = order.choice(OPS), order.choice((1, 3, 40)) if number != count // 2 else 50_000
            with symm_overlap.force_path(path, chunks=order.choice((1, 2)), streams=order.choice((1, 2))):
                op(group, rows, 100 * lane + number)


def in_threads(jobs: Sequence[Callable[[], None]], order: random.Random) -> None:
    """Run every job in a thread of its own, started in random order and at random moments."""
    shuffled = order.sample(list(jobs), len(jobs))
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = []
        for job in shuffled:
            running.append(threads.submit(job))
            time.sleep(order.uniform(0, 0.01))
        for future in running:
            future.result()


def several_lanes(me: Rank, seed: int, check: str, path: str, lanes: Sequence[int]) -> None:
    """The lanes are new, so their workspaces are created while other lanes are in use."""
    with comparing_in_threads(check == "1"):
        jobs = [lambda lane=lane: calls(me.group, lane, seed, 12, path) for lane in lanes]
        in_threads(jobs, random.Random(f"{me.rank} {seed}"))


@pytest.mark.parametrize("path", ["pipelined", "c10d"])
@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("world", one_in(2, [2, 3], first=1))
def test_threads_on_four_lanes_of_one_group_get_exact_results(
    ranks: Pool, fresh_lane: Callable[[], int], world: int, check: str, path: str
) -> None:
    seed = (world + int(check) + (path == "c10d")) % 2  # one of two orders; every pair of choices has both
    ranks.run(world, several_lanes, 2 * seed + int(check), check, path, [fresh_lane() for _ in range(4)])


def several_groups(me: Rank, seed: int) -> None:
    groups = [group for group in me.groups.values() if group.size() > 1]
    jobs = [lambda group=group, lane=lane: calls(group, lane, seed, 6) for group in groups for lane in (0, 1)]
    in_threads(jobs, random.Random(f"{me.rank} {seed}"))


@pytest.mark.parametrize("seed", range(2))
def test_threads_on_overlapping_groups_get_exact_results(ranks: Pool, seed: int) -> None:
    ranks.run(5, several_groups, seed)


def opposite_orders(me: Rank, one: int, other: int) -> None:
    with comparing_in_threads(False):  # comparing would synchronise the ranks before the lanes' first calls
        two_lanes(me, one, other)


def two_lanes(me: Rank, one: int, other: int) -> None:
    """Rank 0 starts ``other`` during its first call on ``one``. Rank 1 ends its calls on ``other`` before ``one``."""
    if me.rank == 0:
        with ThreadPoolExecutor(1) as threads:
            earlier = threads.submit(calls, me.group, one, 0, 3)
            time.sleep(0.3)
            assert not earlier.done()
            calls(me.group, other, 0, 3)
            earlier.result()
    else:
        calls(me.group, other, 0, 3)
        calls(me.group, one, 0, 3)


def test_ranks_may_come_to_two_lanes_in_opposite_orders(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, opposite_orders, fresh_lane(), fresh_lane())


def one_lane(me: Rank, seed: int) -> None:
    """Three threads take turns on one lane. The order of threads differs between ranks, the order of ops does not."""
    turn, number = threading.Condition(), 0
    count, mine = 30, random.Random(f"{me.rank} {seed}")
    caller = [mine.randrange(3) for _ in range(count)]

    def thread(index: int) -> None:
        nonlocal number
        for call in (call for call in range(count) if caller[call] == index):
            with turn:
                while number != call:
                    turn.wait()
            OPS[call % 3](me.group, 1 + call % 4, call)
            with turn:
                number += 1
                turn.notify_all()

    in_threads([lambda index=index: thread(index) for index in range(3)], mine)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_take_turns_on_one_lane_get_exact_results(ranks: Pool, seed: int) -> None:
    ranks.run(3, one_lane, seed)


def forked_child_calls(me: Rank, lane: int, allocates: bool) -> str:
    read, write = os.pipe()
    with comparing(False):
        gather(me.group, 3, 2)
    lock: Any = state_of(me.group).lane(me.group, torch.device("cpu"), 0).lock
    lock.__enter__()  # as if another thread of the parent were in a call
    if os.fork() == 0:
        message = "the call went through"
        try:
            with comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(2):
                if allocates:
                    symm_overlap.empty(4, group=me.group)
                else:
                    gather(me.group, 3, 2)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, message.encode())
            os._exit(0)
    lock.__exit__()
    os.wait()
    gather(me.group, 3, 3)  # the parent can still call
    return os.read(read, 4096).decode()


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("new", [False, True], ids=["lane that the parent used", "new lane"])
def test_a_forked_child_cannot_call_in_the_place_of_its_rank(
    ranks: Pool, fresh_lane: Callable[[], int], new: bool, allocates: bool
) -> None:
    for rank, message in enumerate(ranks.run(2, forked_child_calls, fresh_lane() if new else 0, allocates)):
        assert message.startswith(f"RuntimeError: this process was forked from rank {rank} of group "), message
        assert f"(pid {ranks.pid(rank)})" in message
        assert "with spawn, not fork" in message


def lane_in_force() -> int:
    return current().lane_index


def test_a_lane_holds_for_the_block_and_the_thread_that_asked_for_it() -> None:
    """`symm_overlap.lane` affects only calls inside its block and in its own thread."""
    with symm_overlap.lane(2):
        with symm_overlap.lane(3):
            assert lane_in_force() == 3
            with ThreadPoolExecutor(1) as threads:
                assert threads.submit(lane_in_force).result() == 0
        assert lane_in_force() == 2
        with pytest.raises(KeyError), symm_overlap.lane(4):
            raise KeyError
        assert lane_in_force() == 2
    assert lane_in_force() == 0
