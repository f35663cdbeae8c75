"""Tests of the kernels for signals and waits: order, epochs, any world size, graphs."""

import random
import time

import pytest
import torch

from tests.gpu.lanes import Lanes

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # length of a sleep that is long enough to be measured: about 10 ms


def test_what_came_before_the_signal_is_seen_after_the_wait() -> None:
    lanes = Lanes(2)
    source, seen = torch.zeros(1 << 20, device="cuda"), torch.zeros(50, 1 << 20, device="cuda")
    torch.cuda.synchronize()
    for epoch in range(50):
        with lanes.on(1) as reader:
            reader.wait([0], 2)
            seen[epoch].copy_(source)
            reader.signal([0], 3)
        with lanes.on(0) as writer:
            writer.sleep(random.Random(epoch).randrange(300_000))
            source.fill_(epoch + 1)
            writer.signal([1], 2)
            writer.wait([1], 3)  # until the reader has copied the source, before it is overwritten
    lanes.check()
    assert torch.equal(seen, torch.arange(1, 51, device="cuda").float()[:, None].expand_as(seen))


def test_a_wait_holds_its_stream_until_the_signal_comes() -> None:
    lanes = Lanes(2)
    done = torch.cuda.Event()
    with lanes.on(1) as reader:
        reader.wait([0], 0)
        done.record()
    with lanes.on(0) as writer:
        writer.sleep(CYCLES)
        early = done.query()
        writer.signal([1], 0)
    lanes.check()
    assert not early
    assert done.query()


@pytest.mark.parametrize("world", [3, 33, 200])  # few ranks; more than a warp; more than one launch can handle
def test_one_launch_tells_all_peers_and_one_waits_for_all(world: int) -> None:
    """Rank 0 signals all peers at once, and waits for all at once. All peers use one stream, as in the barrier test."""
    lanes = Lanes(world)
    others = list(range(1, world))
    mark, seen = torch.zeros(1, device="cuda"), torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    for epoch in range(3):
        with lanes.on(0) as lane:
            lane.signal(others, 1)
            lane.wait(others[::-1], 2)
            seen[epoch : epoch + 1].copy_(mark)
        with lanes.on(1):
            for peer in others:
                lanes[peer].wait([0], 1)
            for peer in others[:-1]:
                lanes[peer].signal([0], 2)
            lanes[1].sleep(CYCLES)
            mark.fill_(epoch + 1)
            lanes[others[-1]].signal([0], 2)
    lanes.check()
    assert seen.tolist() == [1, 2, 3]


def test_a_rank_is_named_once_in_a_launch() -> None:
    lanes = Lanes(3)
    for call in (lanes[0].signal, lanes[0].wait):
        with pytest.raises(ValueError, match="rank 2 is named more than once"):
            call([2, 1, 2], 0)
        with pytest.raises(RuntimeError, match=r"rank must be in \[0, 3\), not 3"):
            call([1, 3], 0)
        call([], 0)
    lanes.check()


def test_signals_may_run_ahead_of_their_waits() -> None:
    lanes = Lanes(2)
    with lanes.on(0) as writer:
        for _ in range(5):
            writer.signal([1], 0)
    lanes.check()
    with lanes.on(1) as reader:
        for _ in range(5):
            reader.wait([0], 0)
    lanes.check()


def test_a_channel_does_not_hear_another() -> None:
    lanes = Lanes(2, timeout=0.05)
    with lanes.on(0) as writer:
        writer.signal([1], 0)
        writer.signal([1], 2)
    torch.cuda.synchronize()
    with lanes.on(1) as reader:
        reader.wait([0], 0)
        reader.wait([0], 2)
        torch.cuda.synchronize()
        assert reader.failure() is None
        reader.wait([0], 1)
        torch.cuda.synchronize()
        assert reader.failure().channel == 1


def test_epochs_wrap_around() -> None:
    lanes = Lanes(3)
    lanes.advance(-3)  # 2**32 - 3
    for _ in range(6):
        for rank in range(3):
            with lanes.on(rank) as lane:
                lane.barrier(1)
    lanes.check()
    assert {int(block[-1]) for block in lanes.blocks[:2]} == {-3}  # channel 3 was not used


@pytest.mark.parametrize("world", [2, 5])
def test_no_rank_leaves_a_barrier_before_all_have_arrived(world: int) -> None:
    rounds = 8
    lanes, chance = Lanes(world), random.Random(world)
    marks = torch.zeros(world, dtype=torch.int32, device="cuda")
    seen = torch.zeros(world, rounds, world, dtype=torch.int32, device="cuda")
    for rank in range(world):  # each alignment has its own kernel, which is loaded at its first launch
        marks[rank : rank + 1].fill_(0)
    torch.cuda.synchronize()
    for number in range(rounds):
        for rank in chance.sample(range(world), world):
            with lanes.on(rank) as lane:
                if chance.random() < 0.3:
                    lane.sleep(chance.randrange(200_000))
                marks[rank : rank + 1].fill_(number + 1)
                lane.barrier(0)
                seen[rank, number].copy_(marks)
                lane.barrier(1)  # protects the marks from the next round until all ranks have read them
    lanes.check()
    expected = torch.arange(1, rounds + 1, dtype=torch.int32, device="cuda")[None, :, None].expand_as(seen)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("world", [32, 33, 70])
def test_a_barrier_is_with_all_ranks_however_many(world: int) -> None:
    """The barrier of one rank. One stream does the part of all peers, because there are not enough hardware queues."""
    lanes = Lanes(world)
    last_ranks = sorted({1, 31, 32, 33, 64, world - 1} & set(range(1, world)))
    mark = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(len(last_ranks), dtype=torch.int32, device="cuda")
    mark.fill_(0)
    torch.cuda.synchronize()
    for number, last in enumerate(last_ranks):
        with lanes.on(0) as lane:
            lane.barrier(0)
            seen[number : number + 1].copy_(mark)
            lane.signal([1], 1)  # [read]
        with lanes.on(1):
            for peer in range(1, world):
                if peer != last:
                    lanes[peer].signal([0], 0)
            lanes[1].sleep(CYCLES)
            mark.fill_(number + 1)
            lanes[last].signal([0], 0)
            for peer in range(1, world):
                lanes[peer].wait([0], 0)
            lanes[1].wait([0], 1)  # [read]
    lanes.check()
    assert seen.tolist() == list(range(1, len(last_ranks) + 1))


def test_sleep_takes_time_in_proportion() -> None:
    lanes = Lanes(1)

    def milliseconds(cycles: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with lanes.on(0) as lane:
            start.record()
            lane.sleep(cycles)
            stop.record()
        lanes.check()
        return start.elapsed_time(stop)

    start = time.monotonic()
    while time.monotonic() - start < 0.3:  # until the multiprocessors have reached their full clock
        milliseconds(CYCLES)
    short, long = milliseconds(CYCLES), milliseconds(5 * CYCLES)
    assert short > 1.0
    assert 4.0 < long / short < 6.0


def test_a_graph_counts_on_at_every_replay() -> None:
    lanes = Lanes(2, timeout=0.2)
    source, target = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for rank in range(2):
            lanes.streams[rank].wait_stream(main)
        with lanes.on(1) as reader:
            reader.wait([0], 0)
            target.copy_(source)
        with lanes.on(0) as writer:
            source.add_(1)
            writer.signal([1], 0)
        for rank in range(2):
            main.wait_stream(lanes.streams[rank])
    for replay in range(1, 6):
        graph.replay()
        lanes.check()
        assert target.item() == replay
    lanes[1].wait([0], 0)  # a sixth signal was never sent
    torch.cuda.synchronize()
    assert (lanes[1].failure().expected, lanes[1].failure().found) == (6, 5)


def test_what_is_out_of_range_is_refused() -> None:
    lanes = Lanes(2, channels=3)
    for call in (lanes[0].signal, lanes[0].wait):
        for peer in (-1, 2):
            with pytest.raises(RuntimeError, match=rf"rank must be in \[0, 2\), not {peer}"):
                call([peer], 0)
        with pytest.raises(RuntimeError, match=r"channel must be in \[0, 3\), not 3"):
            call([1], 3)
    with pytest.raises(RuntimeError, match=r"channel must be in \[0, 3\), not -1"):
        lanes[0].barrier(-1)
    lanes.check()
