"""A rendezvous returns a handle on every rank, or raises the reason on every rank. It leaves nothing half done."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable

import pytest
import torch

import symm_overlap
from symm_overlap import _C
from symm_overlap._torch import symm_mem
from symm_overlap.runtime import direct_access, state_of, symmetric
from tests.limits import SOON, Death
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, in_thread, make, shared_files
from tests.transforms import comparing, make_room


def sizes_that_differ(me: Rank) -> tuple[str, str]:
    tensor = symm_mem.empty(100 if me.rank == 1 else 50, device="cpu")
    kind, message, _ = error_of(symm_mem.rendezvous, tensor, me.group)
    make(me.group, 4)[1].barrier()  # in step
    return kind, message


def pads_that_differ(me: Rank) -> tuple[str, str]:
    before = symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(before + 1024 * me.rank)
    found = error_of(make, me.group, 4)
    symm_mem.set_signal_pad_size(before)
    make(me.group, 4)[1].barrier()
    return found[:2]


def rank_that_comes_late(me: Rank) -> tuple[str, str, float]:
    if me.rank == 1:
        _C.exchange(me.group_name, "late", "")
    with symm_overlap.timeout(0.3 if me.rank == 0 else 60):
        found = error_of(make, me.group, 4)
    if me.rank == 0:
        _C.exchange(me.group_name, "late", "")
    make(me.group, 4)[1].barrier()
    return found


def rank_that_refuses(me: Rank) -> tuple[str, str, float]:
    if me.rank == 1:
        _C.refuse_rendezvous(me.group_name, "", "there is no more paper")
        found = ("", "", 0.0)
    else:
        found = error_of(make, me.group, 4)
    make(me.group, 4)[1].barrier()
    return found


def rank_that_dies_before(me: Rank) -> tuple[str, str, float]:
    pid, handle = make(me.group, 1, dtype=torch.float64)
    pid.fill_(os.getpid())
    handle.barrier()
    death = Death(int(handle.get_buffer(1, (1,), torch.float64)))
    handle.barrier()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, message, _ = error_of(make, me.group, 4)
    return kind, message, death.seconds_ago()


def unknown_group(me: Rank) -> None:
    tensor = symm_mem.empty(4, device="cpu")
    assert "no such group" in error_of(symm_mem.rendezvous, tensor, "no such group")[1]


def make_once(me: Rank) -> None:
    make(me.group, 4)


def make_and_free_for_ever(me: Rank) -> None:
    while True:
        tensor, handle = make(me.group, 300_000)
        handle.get_buffer((me.rank + 1) % me.world, (300_000,), torch.float32).fill_(1)
        handle.barrier()
        del tensor, handle


def tags_do_not_meet(me: Rank) -> None:
    """Two threads meet their peers under different tags. On each rank, a different thread comes first."""
    make(me.group, 1)  # the first call does imports, whose time would decide which thread is first
    found = {}

    def work(tag: int) -> None:
        tensor = symm_mem.empty(4, device="cpu").fill_(10 * tag + me.rank)
        if tag != me.rank:
            time.sleep(0.3)
        with symm_overlap.timeout(20):
            _C.rendezvous(tensor, me.group_name, f"tag {tag}")
        handle = symm_mem.rendezvous(tensor, me.group_name)
        found[tag] = [int(handle.get_buffer(rank, (1,), torch.float32)) for rank in range(me.world)]
        handle.barrier()

    for thread in [in_thread(work, tag) for tag in range(2)]:
        thread.join()
    assert found == {0: [0, 1], 1: [10, 11]}


def first_calls_on_lanes_from_threads(me: Rank) -> None:
    make(me.group, 1)
    found = {}

    def work(index: int) -> None:
        if index != me.rank:
            time.sleep(0.3)
        with symm_overlap.lane(index), symm_overlap.timeout(20), symm_overlap.force_path("pipelined"):
            gathered = symm_overlap.all_gather(torch.full((1, 2), 10.0 * index + me.rank), 0, me.group)
        found[index] = gathered[:, 0].tolist()

    for thread in [in_thread(work, index) for index in range(2)]:
        thread.join()
    assert found == {0: [0, 1], 1: [10, 11]}


def peer_whose_lane_broke(me: Rank, device: str) -> tuple[str, str, float]:
    lane = state_of(me.group).lane(me.group, torch.device(device), 0)
    if device == "cpu":
        make_room(me.group, 4)
    if me.rank == 1:
        lane.give_up("all_gather", ArithmeticError())
        return "", "", 0.0
    if device == "cpu":
        with comparing(False):  # comparing calls would find the broken lane before memory is allocated
            return error_of(make_room, me.group, 1 << 22)
    # There is no GPU to allocate memory on, but the ranks of a GPU lane meet here before they allocate.
    return error_of(symmetric.on_every_rank, lambda: torch.empty(0), me.group, lane._tag)


def topology_from_threads(me: Rank) -> None:
    """On rank 0, two threads ask one after the other. On rank 1, they ask at the same time."""
    answers = []

    def ask() -> None:
        with symm_overlap.timeout(5):
            answers.append(direct_access(state_of(me.group), me.device, False))

    first = in_thread(ask)
    if me.rank == 0:
        first.join()
    second = in_thread(ask)
    first.join()
    second.join()
    assert answers == [True, True]


def rank_without_topology(me: Rank) -> tuple[str, str, float]:
    if me.rank == 1:
        time.sleep(0.5)
        return "", "", 0.0
    with symm_overlap.timeout(0.2):
        return error_of(direct_access, state_of(me.group), me.device, False)


def descriptors(me: Rank, count: int) -> list[int]:
    """Return how many files ``count`` symmetric tensors keep open: in shared memory, and in total."""
    gc.collect()  # tensors that earlier tests left in reference cycles must not be freed between two counts
    first = make(me.group, 4)  # opens the files that each peer needs once
    before = len(shared_files()), len(os.listdir("/proc/self/fd"))
    kept = [make(me.group, 4) for _ in range(count)]
    during = len(shared_files()), len(os.listdir("/proc/self/fd"))
    first[1].barrier()
    del kept
    after = len(shared_files()), len(os.listdir("/proc/self/fd"))
    assert after == before, (before, during, after)
    return [during[0] - before[0], during[1] - before[1]]


def too_many_files(me: Rank) -> tuple[str, str]:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, limits[1]))
    kept = []
    try:
        return error_of(lambda: [kept.append(symm_mem.empty(1, device="cpu")) for _ in range(20)])[:2]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_sizes_that_differ_raise_on_every_rank_with_both_sizes(ranks: Pool) -> None:
    for kind, message in ranks.run(3, sizes_that_differ):
        assert kind == "ValueError"
        assert "rank 0 brought 200 bytes, rank 1 brought 400." in message


def test_pads_that_differ_raise_on_every_rank_with_both_sizes(ranks: Pool) -> None:
    for kind, message in ranks.run(2, pads_that_differ):
        assert kind == "ValueError"
        assert "rank 0 has a signal pad of 9216 bytes, rank 1 one of 10240" in message


def test_a_rank_that_does_not_come_meets_the_deadline_and_learns_it_when_it_does(ranks: Pool) -> None:
    """Rank 0 fails at its deadline. When rank 1 arrives later, it fails at once, with the error of rank 0."""
    (kind, message, seconds), (kind_late, message_late, seconds_late) = ranks.run(2, rank_that_comes_late)
    expected = rf"rendezvous of group '1': rank 1 did not come to rank 0 (pid {ranks.pid(0)}) within 0.3 s"
    assert kind == kind_late == "DistBackendError"
    assert 0.3 <= seconds < SOON
    assert expected.split(":", 1)[1] in message
    assert "rank 0 failed: " in message_late
    assert expected.split(":", 1)[1] in message_late
    assert seconds_late < SOON


def test_a_rank_with_nothing_to_bring_tells_its_peers(ranks: Pool) -> None:
    """A rank that cannot take part in a rendezvous refuses it, and its peers receive the reason."""
    found = ranks.run(3, rank_that_refuses)
    for kind, message, seconds in (found[0], found[2]):
        assert kind == "DistBackendError"
        assert "rank 1 failed: there is no more paper" in message
        assert seconds < SOON


def test_a_rank_that_died_before_the_rendezvous_is_reported_within_a_second(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(3)
    pid = pool.pid(1)
    found = pool.submit((0, 1, 2), rank_that_dies_before).outcomes(timeout=20)
    for survivor in (found[0], found[2]):
        assert survivor.failure is None, survivor.failure
        kind, message, seconds = survivor.value
        assert kind == "DistBackendError"
        assert f"rank 1 (pid {pid}) is dead" in message
        assert seconds < 1


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_killed_at_any_moment_is_noticed_by_all(fresh_ranks: Callable[..., Pool], seed: int) -> None:
    pool = fresh_ranks(3)
    pool.run(3, make_once)
    running = pool.submit((0, 1, 2), make_and_free_for_ever)
    generator = random.Random(seed)
    time.sleep(0.05 + 0.2 * generator.random())
    victim = generator.randrange(3)
    os.kill(pool.pid(victim), signal.SIGKILL)
    start = time.monotonic()
    found = running.outcomes(timeout=20)
    assert time.monotonic() - start < SOON, "the other ranks notice the death, whatever they are doing"
    for rank, outcome in enumerate(found):
        if rank != victim:
            assert "is dead" in outcome.failure, outcome.failure


def test_a_group_that_is_not_there_is_named(ranks: Pool) -> None:
    """The error for an unknown group contains the group's name."""
    ranks.run(1, unknown_group)


def test_rendezvous_of_different_tags_may_overlap(ranks: Pool) -> None:
    ranks.run(2, tags_do_not_meet)


def test_lanes_that_threads_use_for_the_first_time_do_not_meet(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2, environment={"SYMM_OVERLAP_CHECK": None}).run(2, first_calls_on_lanes_from_threads)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_lane_that_broke_on_one_rank_does_not_keep_its_peers_waiting_for_room(
    fresh_ranks: Callable[..., Pool], device: str
) -> None:
    (kind, message, seconds), _ = fresh_ranks(2).run(2, peer_whose_lane_broke, device)
    assert kind == "DistBackendError"
    assert "rank 1 failed: its lane broke in all_gather: ArithmeticError" in message
    assert seconds < SOON


def test_threads_may_ask_for_the_topology_at_once(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2)
    pool.run(2, topology_from_threads)


def test_a_rank_missing_from_the_topology_meets_the_deadline(fresh_ranks: Callable[..., Pool]) -> None:
    """If a rank does not take part in the exchange of topologies, the others fail at the deadline."""
    (kind, message, seconds), _ = fresh_ranks(2).run(2, rank_without_topology)
    assert kind == "DistBackendError"
    assert "cpu topology of group '0': rank 1 did not come to rank 0" in message
    assert 0.2 <= seconds < SOON


def test_a_tensor_costs_one_open_file_however_many_peers_it_has(ranks: Pool) -> None:
    assert ranks.run(4, descriptors, 20) == [[20, 20]] * 4


def test_too_many_open_files_are_named(ranks: Pool) -> None:
    ((kind, message),) = ranks.run(1, too_many_files)
    assert kind == "RuntimeError"
    assert (
        "Too many open files. Each symmetric tensor and each peer keeps a file open: free some tensors, or raise the "
        "limit (ulimit -n)" in message
    )
