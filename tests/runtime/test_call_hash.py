"""The ranks of a lane announce their calls. If ranks are in different calls, every rank soon raises an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import symm_overlap
from symm_overlap import _C
from symm_overlap._torch import symm_mem
from symm_overlap.runtime import call_hash
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, in_thread, make

DEADLINE = 30.0  # seconds; a mismatch is reported in a small part of this time
ADVICE = "Set SYMM_OVERLAP_CHECK=1 on every rank to see both calls in full"

Call = tuple[int, int]
"""(hash, number)"""


def new_lane(me: Rank) -> _C.CpuLane:
    """Return a new lane. It keeps the memory of its workspace alive."""
    return _C.CpuLane(make(me.group, 1)[0], me.group_name)


def call(lane: _C.CpuLane, me: Rank, call: Call) -> None:
    """Do what an all-gather does: signal every peer, then wait for every peer."""
    lane.begin(round(1000 * DEADLINE), *call)
    peers = [(me.rank + step) % me.world for step in range(1, me.world)]
    for peer in peers:
        lane.signal(peer, 0)
    for peer in peers:
        lane.wait(peer, 0)


def many_calls(me: Rank, count: int) -> None:
    lane = new_lane(me)
    for number in range(count):
        call(lane, me, (1000 + number % 7, number))
    call(lane, me, (0, 0))
    call(lane, me, (5, count))


def different_calls(me: Rank, calls: list[list[Call]]) -> tuple[str, str, float]:
    """Each rank makes its own calls."""
    lane = new_lane(me)
    for each in calls[me.rank][:-1]:
        call(lane, me, each)
    return error_of(call, lane, me, calls[me.rank][-1])


def never_signalled(me: Rank, calls: list[Call]) -> tuple[str, str, float]:
    lane = new_lane(me)
    lane.begin(round(1000 * DEADLINE), *calls[me.rank])
    return error_of(lane.wait, (me.rank + 1) % me.world, 1)


def hash_of_zero(me: Rank) -> None:
    lane = new_lane(me)
    for number in range(3):
        call(lane, me, (0, number + me.rank))


def bad_arguments(me: Rank) -> list[tuple[str, str]]:
    lane = new_lane(me)
    plain = symm_mem.empty(1, device="cpu")
    tries: list[Callable[[], object]] = [
        lambda: _C.CpuLane(plain, me.group_name),
        lambda: lane.begin(10, 1, -1),
        lambda: lane.signal(me.world, 0),
        lambda: lane.wait(-1, 0),
        lambda: lane.why_gone(me.world),
    ]
    return [error_of(attempt)[:2] for attempt in tries]


def deadline_of_the_caller(me: Rank) -> tuple[str, str, float]:
    """Wait in a thread other than the one that set the timeout and began the call."""
    lane, found = new_lane(me), []
    with symm_overlap.timeout(0.2):
        lane.begin(0)
    in_thread(lambda: found.append(error_of(lane.wait, me.rank, 0))).join()
    return found[0]


def peer_that_gave_up(me: Rank) -> tuple[str, str]:
    lane = new_lane(me)
    lane.begin(round(1000 * DEADLINE), 7, 0)
    if me.rank == 0:
        lane.give_up()
        return "", ""
    kind, message, seconds = error_of(lane.wait, 0, 0)
    assert seconds < SOON
    assert lane.why_gone(0) in message
    return kind, message


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_in_the_same_calls_go_on(ranks: Pool, world: int) -> None:
    ranks.run(world, many_calls, 200)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        pytest.param(
            [[(1, 0), (2, 1)], [(1, 0), (3, 1)]],
            ["both are call number 2 of their rank, but op, shapes, dtypes or settings differ"] * 2,
            id="another hash",
        ),
        pytest.param(
            [[(1 << 63, 0)], [(1 << 63 | 1, 0)]],
            ["both are call number 1 of their rank, but op, shapes, dtypes or settings differ"] * 2,
            id="all 64 bits count",
        ),
        pytest.param(
            [[(1, 5)], [(1, 4)]],
            [
                "it is in its call number 5, this rank in its call number 6",
                "it is in its call number 6, this rank in its call number 5",
            ],
            id="one call behind",
        ),
    ],
)
def test_ranks_in_different_calls_are_told_on_every_rank(
    fresh_ranks: Callable[..., Pool], calls: list[list[Call]], said: list[str]
) -> None:
    for rank, (kind, message, seconds) in enumerate(fresh_ranks(2).run(2, different_calls, calls)):
        assert kind == "DistBackendError"
        assert seconds < SOON
        assert ADVICE in message
        found_by_itself = said[rank] in message and f"rank {1 - rank} (pid" in message
        assert found_by_itself or "has found a rank in a different call than its own" in message
        assert "Exception raised from" not in message, "no C++ stack"


@pytest.mark.parametrize("calls", [[(1, 3), (2, 3)], [(1, 3), (1, 4)], [(1, 4), (1, 3)]])
def test_a_wait_for_a_channel_that_the_peers_call_does_not_have_ends_soon(
    fresh_ranks: Callable[..., Pool], calls: list[Call]
) -> None:
    for kind, message, seconds in fresh_ranks(2).run(2, never_signalled, calls):
        assert kind == "DistBackendError"
        assert seconds < SOON
        assert "different call" in message
        assert ADVICE in message


def test_a_third_rank_learns_of_two_that_differ(fresh_ranks: Callable[..., Pool]) -> None:
    """If two of three ranks are in different calls, the third rank also raises an error soon."""
    calls = [[(1, 0)], [(2, 0)], [(1, 0)]]
    for kind, message, seconds in fresh_ranks(3).run(3, different_calls, calls):
        assert kind == "DistBackendError"
        assert seconds < SOON
        assert ADVICE in message


def test_a_hash_of_zero_compares_nothing(ranks: Pool) -> None:
    """Calls with hash 0 are not compared, even if their numbers differ."""
    ranks.run(2, hash_of_zero)


def test_a_lane_refuses_what_it_cannot_use(ranks: Pool) -> None:
    unmet, number, peer, source, gone = ranks.run(1, bad_arguments)[0]
    assert unmet[0] == number[0] == "ValueError"
    assert "not symmetric memory with a rendezvous in group" in unmet[1]
    assert "0 or more, not -1" in number[1]
    for (kind, message), rank in ((peer, 1), (source, -1), (gone, 1)):
        assert kind == "RuntimeError"
        assert f"rank must be in [0, 1), not {rank}" in message


def test_a_call_keeps_the_deadline_of_the_thread_that_began_it(ranks: Pool) -> None:
    ((kind, message, seconds),) = ranks.run(1, deadline_of_the_caller)
    assert kind == "DistBackendError"
    assert "did not signal after" in message
    assert 0.2 <= seconds < SOON


def test_a_rank_that_gives_up_ends_its_peers_waits(fresh_ranks: Callable[..., Pool]) -> None:
    _, (kind, message) = fresh_ranks(2).run(2, peer_that_gave_up)
    assert kind == "DistBackendError"
    assert "has failed in this call or an earlier one" in message


def test_other_digests_and_other_numbers_have_other_hashes_of_64_bits_and_none_is_zero() -> None:
    digests = [0, 1, 2, (1 << 64) - 1, 1 << 63]
    hashes = [call_hash(digest, number) for digest in digests for number in range(100)]
    assert len(set(hashes)) == len(hashes) - 1, "those of 0 and 1 in call 0 are equal"
    assert all(0 < each < 1 << 64 for each in hashes)
