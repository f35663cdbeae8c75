"""Signals and waits by memory operations of streams. All ranks are in this process."""

import time

import pytest
import torch

from symm_overlap import _C
from tests.gpu.lanes import Lanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not _C.has_memory_operations(torch.cuda.current_device()),
        reason="this GPU, or its driver, has no memory operations, or CUDA_DEVICE_MAX_CONNECTIONS is below 8",
    ),
]

SOON, LONG = round(0.05 * 1e9), round(100 * 1e9)
CYCLES = 20_000_000  # length of a sleep that is long enough to be measured: about 10 ms


def test_what_came_before_the_signal_is_seen_after_the_wait() -> None:
    lanes = Lanes(3, in_memory=True)
    source, seen = torch.zeros(1 << 20, device="cuda"), torch.zeros(50, 1 << 20, device="cuda")
    torch.cuda.synchronize()
    for epoch in range(50):
        with lanes.on(1) as reader:
            reader.wait([2, 0], 2)
            seen[epoch].copy_(source)
            reader.signal([0], 1)  # [read]
        with lanes.on(2) as other:
            other.signal([1], 2)
        with lanes.on(0) as writer:
            writer.sleep(CYCLES // 10)
            source.fill_(epoch + 1)
            writer.signal([1, 2], 2)
            writer.wait([1], 1)  # [read]
    lanes.check()
    assert torch.equal(seen.amin(1), seen.amax(1))
    assert seen[:, 0].tolist() == list(range(1, 51))


@pytest.mark.parametrize("announced", [0, 1])
def test_a_signal_to_many_peers_is_seen_by_all_of_them(announced: int) -> None:
    """So many writes are one kernel (kFewestInAKernel in csrc/cuda/lane_host.cpp)."""
    world = 9
    lanes = Lanes(world, in_memory=True)
    sources = [torch.zeros(1 << 18, device="cuda") for _ in range(world)]
    seen = torch.zeros(5, world, world, device="cuda")
    torch.cuda.synchronize()
    for number in range(1, 6):
        for rank in range(world):
            lanes[rank].begin(0, number, LONG, call_hash=announced, number=number)
            with lanes.on(rank) as lane:
                sources[rank].fill_(number * world + rank)
                lane.signal([peer for peer in range(world) if peer != rank], 0)  # [written]
        for rank in range(world):
            peers = [peer for peer in range(world) if peer != rank]
            with lanes.on(rank) as lane:
                lane.wait(peers, 0)  # [written]
                seen[number - 1, rank] = torch.stack([source[-1] for source in sources])
                lane.signal(peers, 1)  # [read]
                lane.wait(peers, 1)  # [read]
    lanes.check()
    expected = torch.arange(1, 6)[:, None, None] * world + torch.arange(world)
    assert torch.equal(seen.cpu(), expected.expand(5, world, world).float())


def test_the_deadline_counts_from_when_the_stream_waits() -> None:
    lanes = Lanes(2, in_memory=True)
    lanes[0].begin(5, 17, 2 * 10**9)
    with lanes.on(0) as lane:
        for _ in range(300):
            lane.sleep(CYCLES)  # about three seconds
        lane.wait([1], 0)
    with lanes.on(1) as lane:
        lane.signal([0], 0)
    lanes.check()
    lanes[0].begin(5, 18, SOON)
    with lanes.on(0) as lane:
        lane.wait([1], 3)
    start = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    failure = lanes[0].failure()
    assert (failure.op, failure.call, failure.peer, failure.channel) == (5, 18, 1, 3)
    assert (failure.expected, failure.found) == (1, 0)


def test_a_failure_is_told_and_poisons_outputs() -> None:
    lanes = Lanes(3, in_memory=True)
    outputs = [torch.ones(7, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()  # the outputs must be written before other streams poison them
    for rank in (1, 2):
        lanes[rank].begin(4, 9, LONG)
        with lanes.on(rank) as lane:
            lane.wait([0], 0)
            lane.end([outputs[rank]])
    lanes[0].begin(2, 3, LONG)
    lanes[0].give_up(2, 3)
    with lanes.on(0) as lane:
        lane.wait([1], 0)
        lane.end([outputs[0]])
    start = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 10
    assert all(bool(output.isnan().all()) for output in outputs)
    assert lanes[0].failure().gave_up
    for rank in (1, 2):
        failure = lanes[rank].failure()
        assert (failure.peer_failed, failure.op, failure.call, failure.peer) == (True, 4, 9, 0)


def test_a_barrier_in_a_call_that_all_ranks_are_in_passes_and_is_ordered() -> None:
    lanes, marks, seen = Lanes(3, in_memory=True), torch.zeros(3, device="cuda"), torch.zeros(3, 3, device="cuda")
    for rank in range(3):  # each alignment has its own kernel, which is loaded at its first launch
        marks[rank].fill_(0)
    torch.cuda.synchronize()
    for number in range(1, 5):
        for rank in range(3):
            lanes[rank].begin(0, number, LONG, 10 + number, number)
            with lanes.on(rank) as lane:
                lane.sleep(CYCLES // 10 * rank)
                marks[rank].fill_(number)
                lane.barrier(0)
                seen[rank].copy_(marks)
                lane.signal([peer for peer in range(3) if peer != rank], 1)  # [read]
                lane.wait([peer for peer in range(3) if peer != rank], 1)
                lane.end([seen[rank]])
        lanes.check()
        assert bool((seen == number).all())


def test_ranks_in_different_calls_are_found_when_the_call_ends() -> None:
    lanes, output = Lanes(2, in_memory=True), torch.ones(7, device="cuda")
    torch.cuda.synchronize()  # the output must be written before another stream poisons it
    for rank in range(2):
        lanes[rank].begin(0, 3, LONG, 10 + rank, 3)
    with lanes.on(1) as lane:
        lane.signal([0], 0)
    with lanes.on(0) as lane:
        lane.wait([1], 0)
        lane.end([output])
    torch.cuda.synchronize()
    record = lanes[0].failure()
    assert (record.mismatch, record.peer, record.expected, record.found_call) == (True, 1, 3, 3)
    assert bool(output.isnan().all())
