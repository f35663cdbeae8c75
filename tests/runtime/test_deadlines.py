"""Every wait ends: by its signal, by its deadline, by the death of the peer, or by Ctrl-C. The error names the peer."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
from torch import float32, float64

import symm_overlap
from symm_overlap import _C
from tests.limits import SOON, Death
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, in_thread, make


def message_of_a_timeout(me: Rank) -> tuple[str, str, float]:
    _, handle = make(me.group, 1)
    handle.put_signal((me.rank + 1) % me.world, channel=5)
    handle.wait_signal((me.rank - 1) % me.world, channel=5)
    found = error_of(handle.wait_signal, (me.rank - 1) % me.world, channel=5, timeout_ms=150)
    handle.barrier()
    return os.getpid(), *found


def barrier_that_timed_out(me: Rank) -> None:
    order, handle = make(me.group, 1)
    if me.rank == 0:
        for _ in range(3):
            assert error_of(handle.barrier, timeout_ms=30)[0] == "DistBackendError"
        handle.get_buffer(1, (1,), float32).fill_(1)
        handle.put_signal(1, channel=1)
        handle.barrier()
    else:
        handle.wait_signal(0, channel=1)
        handle.barrier()
        assert order == 1
    handle.barrier()
    if me.rank == 0:
        assert error_of(handle.barrier, timeout_ms=30)[0] == "DistBackendError", "the tries count as one barrier"
    else:
        assert error_of(handle.wait_signal, 0, channel=2, timeout_ms=300)[0] == "DistBackendError"
        handle.barrier()


def by_block(me: Rank) -> None:
    _, handle = make(me.group, 1)
    before = _C.timeout_ms_or_default(0)
    elsewhere = []
    with symm_overlap.timeout(20):
        assert _C.timeout_ms_or_default(0) == 20_000
        with symm_overlap.timeout(0.05):
            assert _C.timeout_ms_or_default(0) == 50
            kind, _, seconds = error_of(handle.wait_signal, me.rank)
            assert kind == "DistBackendError"
            assert 0.05 <= seconds < SOON, "the inner block counts"
            assert 0.25 <= error_of(handle.wait_signal, me.rank, timeout_ms=250)[2] < SOON, "the argument counts most"
        assert _C.timeout_ms_or_default(0) == 20_000
        in_thread(lambda: elsewhere.append(_C.timeout_ms_or_default(0))).join()
    assert elsewhere == [before], "a block is for its own thread"
    with pytest.raises(ZeroDivisionError), symm_overlap.timeout(1):
        raise ZeroDivisionError
    assert _C.timeout_ms_or_default(0) == before


def by_environment(me: Rank) -> None:
    for bad in ("soon", "0", "-1", "nan", "inf", "1s"):  # the pool has already set the first one
        if bad != "soon":
            os.environ["SYMM_OVERLAP_TIMEOUT"] = bad
        kind, message, _ = error_of(_C.timeout_ms_or_default, 0)
        assert kind == "ValueError"
        assert f"SYMM_OVERLAP_TIMEOUT must be a number of seconds above 0 and up to 1e+09, not '{bad}'" in message
    os.environ["SYMM_OVERLAP_TIMEOUT"] = "0.25"
    assert _C.timeout_ms_or_default(0) == 250
    _, handle = make(me.group, 1)
    kind, _, seconds = error_of(handle.wait_signal, me.rank)
    assert kind == "DistBackendError"
    assert 0.25 <= seconds < SOON


def default(me: Rank) -> int:
    return _C.timeout_ms_or_default(0)


def rank_that_ends(me: Rank, how: str) -> tuple[str, str, float]:
    """The last rank ends. The other ranks first receive its last signal, and then notice that it has ended."""
    pids, handle = make(me.group, me.world, dtype=float64)
    last = me.world - 1
    pids[me.rank] = os.getpid()
    handle.barrier()
    death = Death(int(handle.get_buffer(last, (me.world,), float64)[last]))
    handle.barrier(1)
    if me.rank == last:
        for peer in range(last):
            handle.put_signal(peer)
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 0:
        time.sleep(0.3)  # this rank arrives long after the other has died
    else:
        handle.wait_signal(last)
        assert error_of(handle.barrier)[0] == "DistBackendError"  # this rank waits while the last rank dies
    since = death.seconds_ago()
    if me.rank == 0:
        handle.wait_signal(last, timeout_ms=10_000)
    kind, message, seconds = error_of(handle.wait_signal, last)
    return kind, message, seconds if me.rank == 0 else since


def dead_while_another_is_slow(me: Rank) -> list[tuple[str, str, float]]:
    """Rank 0 waits first for rank 1, which arrives much later than the death of rank 2 must be reported."""
    pids, handle = make(me.group, me.world, dtype=float64)
    pids[me.rank] = os.getpid()
    handle.barrier()
    death = Death(int(handle.get_buffer(2, (me.world,), float64)[2]))
    handle.barrier(1)
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 1:
        time.sleep(2)
        return []
    found = error_of(handle.barrier)
    return [(*found[:2], death.seconds_ago()), error_of(make, me.group, 1)]


def interrupt(after: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    in_thread(lambda: (time.sleep(after), os.kill(os.getpid(), signal.SIGINT)))


def interrupted(me: Rank) -> None:
    _, handle = make(me.group, 1)
    if me.rank == 0:
        for wait in (
            lambda: handle.wait_signal(1, channel=1),
            lambda: handle.barrier(1),
            lambda: make(me.group, 1),
            lambda: _C.exchange(me.group_name, "interruption", ""),
        ):
            interrupt(after=0.15)
            kind, _, seconds = error_of(wait)
            assert kind == "KeyboardInterrupt"
            assert seconds < SOON
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        handle.put_signal(1, channel=1)
        handle.wait_signal(1, channel=1)
        handle.barrier(1)
    else:
        handle.wait_signal(0, channel=1)
        handle.put_signal(0, channel=1)
        handle.barrier(1)
        for meet in (lambda: make(me.group, 1), lambda: _C.exchange(me.group_name, "interruption", "")):
            kind, message, seconds = error_of(meet)
            assert kind == "DistBackendError", "the rank that was interrupted has left"
            assert "rank 0 failed: KeyboardInterrupt" in message
            assert seconds < SOON
    make(me.group, 1)  # in step again
    assert _C.exchange(me.group_name, "interruption", f"from {me.rank}") == ["from 0", "from 1"]


def threads_go_on_during_a_wait(me: Rank) -> None:
    _, handle = make(me.group, 1)
    steps, going = [0], threading.Event()

    def work() -> None:
        going.set()
        while going.is_set():
            steps[0] += 1
        handle.put_signal(me.rank)

    thread = in_thread(work)
    going.wait()
    in_thread(lambda: (time.sleep(0.2), going.clear()))
    before = steps[0]
    handle.wait_signal(me.rank, timeout_ms=20_000)
    assert steps[0] > before + 1000, "the other thread did much work before it sent the signal"
    thread.join()


def test_a_timeout_names_ranks_pids_channel_and_epochs(ranks: Pool) -> None:
    found = ranks.run(3, message_of_a_timeout)
    pids = [pid for pid, *_ in found]
    for rank, (pid, kind, message, seconds) in enumerate(found):
        peer = (rank - 1) % 3
        assert kind == "DistBackendError"
        assert re.search(
            rf"wait_signal on rank {rank} of 3 \(group '\w+', pid {pid}, channel 5\): rank {peer} \(pid {pids[peer]}\) "
            r"did not signal after 0\.\d+ s: expected epoch 2, found 1\. .*symm_overlap\.timeout\(seconds\)",
            message,
        ), message
        assert "Exception raised from" not in message, "no C++ stack"
        assert 0.15 <= seconds < SOON


def test_a_barrier_that_timed_out_can_be_called_again(ranks: Pool) -> None:
    ranks.run(2, barrier_that_timed_out)


def test_deadlines_of_blocks_nest_and_belong_to_a_thread(ranks: Pool) -> None:
    """The innermost ``timeout`` block counts, and blocks do not affect other threads."""
    ranks.run(1, by_block)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_is_no_time_is_refused(seconds: float) -> None:
    with (
        pytest.raises(ValueError, match=rf"timeout\({seconds}\): a deadline is a number of seconds above 0 and up to"),
        symm_overlap.timeout(seconds),
    ):
        pass


def test_the_default_deadline_is_300_seconds(fresh_ranks: Callable[..., Pool]) -> None:
    assert fresh_ranks(1, environment={"SYMM_OVERLAP_TIMEOUT": None}).run(1, default) == [300_000]


def test_the_environment_sets_the_deadline(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(1, environment={"SYMM_OVERLAP_TIMEOUT": "soon"}).run(1, by_environment)


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_a_dead_peer_is_reported_within_a_second_but_its_last_signal_counts(
    fresh_ranks: Callable[..., Pool], how: str
) -> None:
    pool = fresh_ranks(3)
    pid = pool.pid(2)
    *survivors, _ = pool.submit((0, 1, 2), rank_that_ends, how).outcomes(timeout=20)
    for survivor in survivors:
        assert survivor.failure is None, survivor.failure
        kind, message, seconds = survivor.value
        assert kind == "DistBackendError"
        assert f"rank 2 (pid {pid}) is dead after" in message
        assert seconds < 1


def test_a_dead_peer_is_reported_while_another_is_slow(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(3)
    pid = pool.pid(2)
    waiting = pool.submit((0, 1, 2), dead_while_another_is_slow).outcomes(timeout=20)[0]
    assert waiting.failure is None, waiting.failure
    for kind, message, seconds in waiting.value:  # of a barrier and of a rendezvous
        assert kind == "DistBackendError"
        assert f"rank 2 (pid {pid}) is dead after" in message
        assert seconds < 1


def test_ctrl_c_ends_every_wait(ranks: Pool) -> None:
    ranks.run(2, interrupted)


def test_a_wait_leaves_other_threads_their_turn(ranks: Pool) -> None:
    ranks.run(1, threads_go_on_during_a_wait)
