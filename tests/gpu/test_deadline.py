"""A wait that exceeds its deadline: the record, the notice to peers, poisoned outputs, and what continues to work."""

import time

import pytest
import torch

from tests.gpu.lanes import Lanes

pytestmark = pytest.mark.gpu

SOON = round(0.05 * 1e9)
LONG = round(100 * 1e9)


def test_a_late_wait_records_who_waited_for_whom() -> None:
    lanes = Lanes(3)
    lanes.advance(6)
    lanes[1].begin(5, 17, SOON)
    lanes[1].wait([2], 3)
    torch.cuda.synchronize()
    failure = lanes[1].failure()
    assert not failure.peer_failed
    assert (failure.op, failure.call, failure.peer, failure.channel) == (5, 17, 2, 3)
    assert (failure.expected, failure.found) == (7, 6)


def test_a_late_wait_for_several_peers_records_the_one_that_did_not_come() -> None:
    lanes = Lanes(4)
    for lane in lanes.lanes:
        lane.begin(5, 17, SOON)
    lanes[1].signal([0], 2)
    lanes[3].signal([0], 2)
    lanes[0].wait([3, 2, 1], 2)
    torch.cuda.synchronize()
    failure = lanes[0].failure()
    assert (failure.peer, failure.channel, failure.expected, failure.found) == (2, 2, 1, 0)


def test_the_first_failure_is_the_one_on_record() -> None:
    lanes = Lanes(3)
    lanes[0].begin(1, 1, SOON)
    lanes[0].wait([2], 1)
    lanes[0].begin(2, 2, SOON)
    lanes[0].wait([1], 0)
    torch.cuda.synchronize()
    assert (lanes[0].failure().op, lanes[0].failure().peer) == (1, 2)


def test_later_waits_of_a_failed_lane_return_at_once() -> None:
    lanes = Lanes(2)
    lanes[0].begin(0, 1, SOON)
    lanes[0].wait([1], 0)
    torch.cuda.synchronize()
    lanes[0].begin(0, 2, LONG)
    start = time.monotonic()
    for channel in range(4):
        lanes[0].wait([1], channel)
    lanes[0].barrier(0)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5


def peers_wait_for_rank_0(lanes: Lanes) -> None:
    for rank in (1, 2):
        lanes[rank].begin(4, 9, LONG)
        with lanes.on(rank) as lane:
            lane.wait([0], 0)


def assert_peers_were_told_of_rank_0(lanes: Lanes) -> None:
    for rank in (1, 2):
        failure = lanes[rank].failure()
        assert failure.peer_failed
        assert (failure.op, failure.call, failure.peer) == (4, 9, 0)


def test_peers_are_told_and_do_not_wait_for_their_own_deadline() -> None:
    lanes = Lanes(3)
    peers_wait_for_rank_0(lanes)
    start = time.monotonic()
    with lanes.on(0) as lane:
        lane.begin(0, 1, SOON)
        lane.wait([1], 2)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 10
    assert not lanes[0].failure().peer_failed
    assert_peers_were_told_of_rank_0(lanes)


def test_when_a_host_gives_up_its_peers_do_not_wait_for_it() -> None:
    lanes = Lanes(3)
    peers_wait_for_rank_0(lanes)
    start = time.monotonic()
    with lanes.on(0) as lane:
        lane.begin(2, 3, LONG)
        lane.give_up(2, 3)
        lane.wait([1], 0)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 10
    own = lanes[0].failure()
    assert own.gave_up
    assert not own.peer_failed
    assert (own.op, own.call, own.peer) == (2, 3, 0)
    assert_peers_were_told_of_rank_0(lanes)


def outputs() -> list[torch.Tensor]:
    return [
        torch.ones(1000, 7, device="cuda"),
        torch.ones(5, 3, device="cuda", dtype=torch.float64).t(),
        torch.ones(33, device="cuda", dtype=torch.bfloat16),
        torch.ones(1, device="cuda", dtype=torch.float16),
        torch.ones(0, device="cuda"),
    ]


def test_outputs_are_poisoned_if_and_only_if_a_wait_failed() -> None:
    lanes, integers = Lanes(2), torch.ones(9, device="cuda", dtype=torch.int64)
    healthy, failed, told = outputs(), outputs(), outputs()
    many = [torch.ones(3, device="cuda") for _ in range(40)]  # more tensors than one launch can poison
    lanes[0].end(healthy)
    lanes[0].begin(0, 1, SOON)
    lanes[0].wait([1], 0)
    lanes[0].end([*failed, integers, *many])
    lanes[1].end(told)  # this rank waited for nothing, but a peer has notified it
    torch.cuda.synchronize()
    assert all(bool((tensor == 1).all()) for tensor in healthy)
    assert all(bool(tensor.isnan().all()) for tensor in [*failed, *told, *many])
    assert bool((integers == -1).all())
    assert lanes[1].failure().peer_failed
    assert lanes[1].failure().peer == 0


def test_only_dense_memory_can_be_poisoned() -> None:
    lanes = Lanes(1)
    with pytest.raises(ValueError, match="only dense CUDA memory"):
        lanes[0].end([torch.ones(4, 4, device="cuda")[:, :2]])


def test_the_context_and_other_lanes_go_on() -> None:
    lanes, other = Lanes(2), Lanes(2)
    lanes[0].begin(0, 1, SOON)
    lanes[0].wait([1], 0)
    torch.cuda.synchronize()
    assert lanes[0].failure() is not None
    for _ in range(3):
        for rank in range(2):
            with other.on(rank) as lane:
                lane.barrier(0)
    other.check()
    a = torch.arange(6.0, device="cuda").view(2, 3)
    assert (a @ a.t()).tolist() == [[5.0, 14.0], [14.0, 50.0]]


def test_a_failing_barrier_names_the_rank_that_is_missing() -> None:
    lanes = Lanes(4, timeout=0.3)
    for rank in (0, 1, 3):
        with lanes.on(rank) as lane:
            lane.barrier(1)
    torch.cuda.synchronize()
    failures = [lanes[rank].failure() for rank in (0, 1, 3)]
    assert any(not failure.peer_failed for failure in failures)
    assert {failure.peer for failure in failures if not failure.peer_failed} == {2}
    assert {failure.peer for failure in failures if failure.peer_failed} <= {0, 1, 3}


def test_ranks_in_different_calls_fail_at_once() -> None:
    lanes = Lanes(2)
    for rank in range(2):
        lanes[rank].begin(0, 3, LONG, 10 + rank, 3)
    with lanes.on(1) as lane:
        lane.signal([0], 0)
    with lanes.on(0) as lane:
        lane.wait([1], 0)
    torch.cuda.synchronize()
    record = lanes[0].failure()
    assert (record.mismatch, record.peer, record.expected, record.found_call) == (True, 1, 3, 3)
    lanes[0].begin(0, 4, LONG)
    with lanes.on(1) as lane:
        lane.wait([0], 0)
    torch.cuda.synchronize()
    assert (lanes[1].failure().peer_failed, lanes[1].failure().peer) == (True, 0)
