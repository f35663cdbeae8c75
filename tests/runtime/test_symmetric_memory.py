"""torch's own symmetric-memory API on CPU tensors: buffers, pads, signals and barriers work as they do on CUDA."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from symm_overlap import _C
from symm_overlap._torch import SymmetricMemory, symm_mem
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, in_thread, make, pauses

WORLDS = [1, 2, 3, 4, 5]


def reads_and_writes(me: Rank) -> None:
    tensor, handle = make(me.group, 4, 6)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (me.rank, me.world, 96)
    assert handle.device == torch.device("cpu")
    assert len(handle.buffer_ptrs) == len(handle.signal_pad_ptrs) == me.world
    assert handle.buffer_ptrs[me.rank] == tensor.data_ptr()
    assert handle.multicast_ptr == 0
    assert tensor.eq(0).all(), "new memory is zero"
    tensor.copy_(torch.arange(24.0).view(4, 6) + 100 * me.rank)
    handle.barrier()
    for peer in range(me.world):
        expected = torch.arange(24.0).view(4, 6) + 100 * peer
        assert handle.get_buffer(peer, (4, 6), torch.float32).equal(expected)
        assert handle.get_remote_tensor(peer, (4, 6), torch.float32).equal(expected)
        assert handle.get_buffer(peer, (5,), torch.float32, 7).equal(expected.flatten()[7:12])
        assert handle.get_buffer(peer, (3,), torch.int64, 2).equal(expected.flatten()[4:10].view(torch.int64))
    handle.barrier()
    for peer in range(me.world):  # each rank writes its own element on every rank
        handle.get_buffer(peer, (1,), torch.float32, me.rank).fill_(-1 - me.rank)
    handle.barrier()
    assert tensor.flatten()[: me.world].tolist() == [-1 - rank for rank in range(me.world)]


def one_handle_a_tensor_and_group(me: Rank) -> None:
    tensor, handle = make(me.group, 16)
    if me.rank == 0:  # on one rank only: a second rendezvous does not communicate
        assert symm_mem.rendezvous(tensor, me.group_name) is handle
        assert symm_mem.rendezvous(tensor[5:].view(torch.int32), me.group) is handle


def other_tensors(me: Rank) -> None:
    plain, symmetric = torch.empty(4), symm_mem.empty(4, device="cpu")
    assert symm_mem.rendezvous(plain, me.group) is None
    if hasattr(symm_mem, "is_symm_mem_tensor"):  # from torch 2.12 on
        assert symm_mem.is_symm_mem_tensor(symmetric)
        assert symm_mem.is_symm_mem_tensor(symmetric[1:])
        assert not symm_mem.is_symm_mem_tensor(plain)
    nothing, handle = make(me.group, 0)
    assert nothing.numel() == handle.buffer_size == 0
    handle.barrier()
    same = [SymmetricMemory.empty_strided_p2p((8,), (1,), torch.float32, me.device, None, 77).data_ptr() for _ in "ab"]
    assert same[0] == same[1], "two calls with one allocation id return the same memory"


def pads(me: Rank) -> None:
    _, handle = make(me.group, 1)
    mine = handle.get_signal_pad(me.rank)
    assert mine.numel() * mine.element_size() == handle.signal_pad_size == symm_mem.get_signal_pad_size()
    assert mine.eq(0).all()
    handle.barrier(channel=3)
    handle.get_signal_pad((me.rank + 1) % me.world, (1,), torch.int32, me.rank).fill_(7 + me.rank)
    handle.barrier()
    from_rank = (me.rank - 1) % me.world
    assert mine[from_rank] == 7 + from_rank
    assert mine.sum() == 7 + from_rank, "built-in signals do not write to the user's pad"


def odd_pads(me: Rank) -> None:
    before = symm_mem.get_signal_pad_size()
    try:
        symm_mem.set_signal_pad_size(4 * me.world + 2)  # one channel; slots directly after the pad would be unaligned
        _, handle = make(me.group, 1)
        handle.barrier(0)
        assert error_of(handle.barrier, 1)[0] == "RuntimeError"
        before_wait = time.thread_time()
        assert error_of(handle.wait_signal, me.rank, 0, timeout_ms=300)[0] == "DistBackendError"
        assert time.thread_time() - before_wait < 0.15, "a wait sleeps, so its slot is aligned, as the kernel requires"
        symm_mem.set_signal_pad_size(4 * me.world - 1)
        tensor = symm_mem.empty(1, device="cpu")
        kind, message, _ = error_of(symm_mem.rendezvous, tensor, me.group)
        assert kind in ("ValueError", "DistBackendError"), "this rank's own error, or the report of a peer's error"
        assert f"a signal pad of {4 * me.world - 1} bytes has no channel for {me.world} ranks" in message
    finally:
        symm_mem.set_signal_pad_size(before)


def signals_run_ahead(me: Rank, times: int) -> None:
    counts, handle = make(me.group, me.world)
    peers = [*range(me.rank + 1, me.world), *range(me.rank + 1)]  # this rank too
    for _, peer in itertools.product(range(times), peers):
        handle.get_buffer(peer, (1,), torch.float32, me.rank).add_(1)
        handle.put_signal(peer, channel=2)
    for n in range(1, times + 1):
        for peer in peers:
            handle.wait_signal(peer, channel=2)
            assert counts[peer] >= n, "a signal arrives after everything that its rank wrote before it"
    handle.barrier()
    assert counts.tolist() == [times] * me.world
    kind, message, _ = error_of(handle.wait_signal, me.rank, channel=2, timeout_ms=20)
    assert kind == "DistBackendError", "each signal ends only one wait"
    assert f"expected epoch {times + 1}, found {times}" in message


def epochs(me: Rank, times: int) -> None:
    """A counter is passed round the ranks. In every 16th round, there is a barrier, on three channels in turn."""
    counter, handle = make(me.group, 1)
    pause = pauses(seed=me.rank)
    left, right = (me.rank - 1) % me.world, (me.rank + 1) % me.world
    for n in range(times):
        if me.rank > 0 or n > 0:
            handle.wait_signal(left)
        next(pause)
        handle.get_buffer(right, (1,), torch.float32).copy_(counter + 1)
        handle.put_signal(right)
        if n % 16 == 0:
            handle.barrier(channel=n % 3)
    if me.rank == 0:
        handle.wait_signal(left)
    handle.barrier()
    assert counter == (times * me.world if me.rank == 0 else (times - 1) * me.world + me.rank)


def barriers_hold_everyone(me: Rank, times: int) -> None:
    arrived, handle = make(me.group, me.world)
    pause = pauses(seed=me.rank)
    for n in range(1, times + 1):
        next(pause)
        for peer in range(me.world):
            handle.get_buffer(peer, (1,), torch.float32, me.rank).fill_(n)
        handle.barrier()
        assert arrived.min() >= n, "no rank leaves a barrier before all ranks have arrived"


def channels_are_apart(me: Rank) -> None:
    _, handle = make(me.group, 1)
    last = symm_mem.get_signal_pad_size() // 4 // me.world - 1
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    handle.put_signal(right, channel=last)
    handle.barrier(channel=last)
    assert error_of(handle.wait_signal, left, channel=0, timeout_ms=20)[0] == "DistBackendError", "another channel"
    assert error_of(handle.wait_signal, right, channel=last, timeout_ms=20)[0] == "DistBackendError", "another rank"
    handle.wait_signal(left, channel=last)
    for call, channel in itertools.product(
        (handle.barrier, lambda c: handle.put_signal(right, c), lambda c: handle.wait_signal(left, c)), (-1, last + 1)
    ):
        kind, message, _ = error_of(call, channel)
        assert kind == "RuntimeError", "the same type as in torch's own symmetric memory"
        assert f"channel must be in [0, {last + 1}) for a group of {me.world} ranks, not {channel}" in message
        assert "maximum supported channel" in message, "torch's own tests look for these words"
    for call, rank in itertools.product((handle.put_signal, handle.wait_signal), (-1, me.world)):
        kind, message, _ = error_of(call, rank)
        assert kind == "RuntimeError"
        assert f"rank must be in [0, {me.world}), not {rank}" in message


def threads_with_a_channel_each(me: Rank, threads: int, times: int) -> None:
    _, handle = make(me.group, 1)
    done = []

    def work(channel: int) -> None:
        for _ in range(times):
            handle.barrier(channel, timeout_ms=20_000)
            handle.put_signal((me.rank + 1) % me.world, channel)
            handle.wait_signal((me.rank - 1) % me.world, channel, timeout_ms=20_000)
        done.append(channel)

    for thread in [in_thread(work, channel) for channel in range(threads)]:
        thread.join()
    assert sorted(done) == list(range(threads))


def threads_allocate(me: Rank, threads: int, times: int) -> None:
    """Each thread allocates, uses and frees its own memory. The threads of a rank may run in any order."""
    wrong, peer = [], (me.rank + 1) % me.world

    def work(number: int) -> None:
        kept = []
        for n in range(times):
            tensor = symm_mem.empty(1000 + n, dtype=torch.int32, device="cpu").fill_(1000 * number + n + me.rank)
            _C.rendezvous(tensor, me.group_name, f"thread {number}")
            handle = symm_mem.rendezvous(tensor, me.group)
            kept = [*kept[-2:], (tensor, handle, n)]
            handle.barrier(timeout_ms=20_000)
            for t, h, k in kept:
                theirs = h.get_buffer(peer, t.shape, torch.int32)
                if (t != 1000 * number + k + me.rank).any() or (theirs != 1000 * number + k + peer).any():
                    wrong.append((number, n, k))
            handle.barrier(timeout_ms=20_000)
        done.append(number)

    done: list[int] = []
    for thread in [in_thread(work, number) for number in range(threads)]:
        thread.join()
    assert sorted(done) == list(range(threads))
    assert not wrong


@pytest.mark.parametrize("world", WORLDS)
def test_peers_read_and_write_each_others_buffers(ranks: Pool, world: int) -> None:
    ranks.run(world, reads_and_writes)


@pytest.mark.parametrize("world", WORLDS)
def test_signals_may_run_ahead_of_their_waits(ranks: Pool, world: int) -> None:
    ranks.run(world, signals_run_ahead, 50)


@pytest.mark.parametrize("world", one_in(3, WORLDS))
def test_signals_and_barriers_hold_over_many_epochs(ranks: Pool, world: int) -> None:
    ranks.run(world, epochs, 400)
    ranks.run(world, barriers_hold_everyone, 300)


def test_a_rendezvous_happens_once_a_tensor_and_group(ranks: Pool) -> None:
    """A second rendezvous of the same memory in the same group returns the same handle, without communication."""
    ranks.run(2, one_handle_a_tensor_and_group)


def test_only_symmetric_tensors_are_symmetric(ranks: Pool) -> None:
    """Plain tensors have no rendezvous. Views and empty tensors of symmetric memory count as symmetric."""
    ranks.run(2, other_tensors)


def test_signal_pads_are_the_users_own(ranks: Pool) -> None:
    ranks.run(3, pads)


def test_pads_of_any_size_work_or_are_refused(ranks: Pool) -> None:
    ranks.run(3, odd_pads)


def test_channels_ranks_and_barriers_do_not_mix_and_have_bounds(ranks: Pool) -> None:
    ranks.run(3, channels_are_apart)


def test_threads_use_a_handle_at_once_on_a_channel_each(ranks: Pool) -> None:
    ranks.run(2, threads_with_a_channel_each, 4, 100)


def test_threads_may_allocate_and_free_at_once(ranks: Pool) -> None:
    ranks.run(2, threads_allocate, 4, 25)
