"""A rank is late, fails, dies, or ends: its peers learn of it in time, with waits by kernels and by memory operations.

The same tests run on CPU ranks. They raise when a GPU can only poison its outputs: see `error_of`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.runtime.script import Script
from symm_overlap.settings import transformed
from tests.gpu.conditions import Path, error_of, finish, on_path
from tests.gpu.conftest import WAITS, Worlds
from tests.ranks import Pool, Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

PIPELINED: Path = ("pipelined", 1, 2)
PATHS: list[Path] = [PIPELINED, ("fused", 1, None)]
BY_WAITS = pytest.mark.parametrize("waits", WAITS)


def gather(me: Rank, path: Path = PIPELINED) -> torch.Tensor:
    A, B = torch.ones(64, 32, device=me.device), torch.ones(32, 16, device=me.device)
    with on_path(path):
        return symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0]


def scatter(me: Rank, path: Path = PIPELINED) -> torch.Tensor:
    A, B = torch.ones(64 * me.world, 32, device=me.device), torch.ones(32, 16, device=me.device)
    with on_path(path):
        return symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)


def works(me: Rank) -> None:
    """Check that calls work, on a lane that has not failed."""
    assert torch.equal(gather(me), torch.full((64 * me.world, 16), 32.0, device=me.device))
    finish(me)
    symm_overlap.raise_failures()


# --- late


def comes_late(me: Rank, lane: int) -> str:
    with symm_overlap.lane(lane):
        works(me)
        dist.barrier(me.group)
        if me.rank == me.world - 1:
            time.sleep(2.0)
        with symm_overlap.timeout(0.5):
            # Two calls: the late rank can complete the first one, because its peers published their shards in time.
            said = error_of(me, lambda: (gather(me), gather(me))[1])
        symm_overlap.raise_failures()  # the failure is reported only once, but the lane stays unusable
        with pytest.raises((dist.DistBackendError, RuntimeError)):
            gather(me)
    works(me)
    return said


@BY_WAITS
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_comes_late_is_named_and_nobody_gets_a_wrong_result(
    gpu_ranks: Worlds, fresh_lane: Callable[[], int], world: int, waits: str
) -> None:
    lane, late = fresh_lane(), world - 1
    said = gpu_ranks.run(world, comes_late, lane, waits=waits)
    assert any(f"rank {late}" in text and "channel" in text for text in said[:late]), said
    for text in said:
        assert "all_gather_matmul" in text
        if gpu_ranks.device == "cuda":
            assert f"lane {lane}" in text


# --- an error


def host_fails(me: Rank, lane: int) -> str:
    """The last rank has no memory for its product in the middle of a call, long before any deadline."""
    last = me.world - 1

    def no_room(plan: Plan, table: Table) -> Table:
        def fail(step: Step) -> None:
            raise MemoryError("no room")

        return {**table, "produce": fail}

    with symm_overlap.lane(lane):
        scatter(me)
        finish(me)
        dist.barrier(me.group)
        start = time.monotonic()
        if me.rank == last:
            with transformed(no_room), pytest.raises(MemoryError, match="no room"):
                scatter(me)
            said = ""
        else:
            said = error_of(me, lambda: scatter(me))
        assert time.monotonic() - start < 20
        if me.device.type == "cuda" and me.rank == last:
            finish(me)  # with waits by kernels, a kernel reports that the host gave up, and it may not have run yet
            with pytest.raises(dist.DistBackendError):
                symm_overlap.raise_failures()
    works(me)
    return said


@BY_WAITS
@pytest.mark.parametrize("world", [2, 3])
def test_an_error_on_a_host_ends_the_waits_of_its_peers_at_once(
    gpu_ranks: Worlds, fresh_lane: Callable[[], int], world: int, waits: str
) -> None:
    *peers, own = gpu_ranks.run(world, host_fails, fresh_lane(), waits=waits)
    assert own == ""
    for said in peers:
        assert f"rank {world - 1}" in said


# --- death


@contextmanager
def pool(worlds: Worlds, world: int, waits: str) -> Iterator[Pool]:
    made = worlds.pool(world, waits=waits)
    try:
        yield made
    finally:
        made.kill()


def wait_until_dead(pid: int) -> None:
    """Wait until a process is dead. The operating system needs time to end it if it has used a GPU."""
    watched = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        assert poll.poll(20_000), "the process did not die within 20 seconds"
    finally:
        os.close(watched)


def loses_its_peer(me: Rank, path: Path, peer: int, in_call: bool) -> tuple[str, float]:
    """Kill rank 1 before or during a call. Return the error on rank 0, and the seconds from the death to the error."""
    for op in (gather, scatter):  # loads the kernels
        op(me, path)
    finish(me)
    dist.barrier(me.group)
    if me.rank == 1:
        time.sleep(0.5 if in_call else 0.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if in_call and me.device.type == "cuda":
        output = gather(me, path)
        wait_until_dead(peer)
        start = time.monotonic()
        return error_of(me, lambda: output), time.monotonic() - start
    if not in_call:
        wait_until_dead(peer)
    start = time.monotonic()
    return error_of(me, lambda: gather(me, path)), time.monotonic() - start


@BY_WAITS
@pytest.mark.parametrize("in_call", [False, True])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_death_of_a_peer_is_noticed_within_a_second(
    gpu_ranks: Worlds, path: Path, in_call: bool, waits: str
) -> None:
    with pool(gpu_ranks, 2, waits) as ranks:
        found = ranks.submit((0, 1), loses_its_peer, path, ranks.pid(1), in_call).outcomes(60)
    assert "killed by SIGKILL" in str(found[1].failure)
    assert found[0].failure is None, found[0].failure
    said, seconds = found[0].value
    assert "rank 1" in said
    if "SYMM_OVERLAP_HOST_GPU" not in os.environ:  # the threads of the host GPU compete for cores with other programs
        # On CPU, the time of a call includes the wait for the death.
        assert seconds < (2.0 if gpu_ranks.device == "cpu" and in_call else 1.0)


# --- limits of a call


def interrupted_before_it_is_issued(me: Rank, lane: int) -> bool:
    """Return whether the current stream is still the caller's, after a call that an interruption ended early."""
    with symm_overlap.lane(lane):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                gather(me)
            torch.cuda.synchronize()
        dist.barrier(me.group)
        mine = torch.cuda.Stream()
        with torch.cuda.stream(mine):
            with mock.patch.object(Script, "_run", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
                gather(me)
            stayed = torch.cuda.current_stream() == mine
        finish(me)
        with suppress(dist.DistBackendError):
            symm_overlap.raise_failures()
    works(me)
    return stayed


@pytest.mark.gpu
def test_an_interruption_leaves_the_current_stream_as_it_was(gpu_ranks: Worlds, fresh_lane: Callable[[], int]) -> None:
    assert gpu_ranks.run(2, interrupted_before_it_is_issued, fresh_lane()) == [True, True]


def has_no_time(me: Rank, lane: int) -> str:
    with symm_overlap.lane(lane):
        works(me)
        dist.barrier(me.group)
        if me.rank == 1:
            time.sleep(1.0)
        with symm_overlap.timeout(1e-10):
            return error_of(me, lambda: gather(me))


@BY_WAITS
def test_the_shortest_deadline_is_one_that_a_late_peer_misses(
    gpu_ranks: Worlds, fresh_lane: Callable[[], int], waits: str
) -> None:
    assert "no signal from rank 1" in gpu_ranks.run(2, has_no_time, fresh_lane(), waits=waits)[0]


# --- what may keep a wait from ending


def holds_the_interpreter(me: Rank, lane: int) -> float:
    """Hold Python's lock beyond the deadline of a wait. Return the seconds from its release to the end of the wait."""
    with symm_overlap.lane(lane):
        works(me)
        dist.barrier(me.group)
        if me.rank == 1:
            time.sleep(6.0)
            return 0.0
        with symm_overlap.timeout(1.5):
            gather(me)
        ctypes.PyDLL(None).usleep(4_000_000)  # holds Python's lock, as a long call of a C library may
        start = time.monotonic()
        finish(me)
        seconds = time.monotonic() - start
        with pytest.raises(dist.DistBackendError):
            symm_overlap.raise_failures()
        return seconds


@BY_WAITS
@pytest.mark.gpu
def test_a_deadline_holds_while_a_thread_keeps_pythons_lock(
    gpu_ranks: Worlds, fresh_lane: Callable[[], int], waits: str
) -> None:
    assert gpu_ranks.run(2, holds_the_interpreter, fresh_lane(), waits=waits)[0] < 0.2
