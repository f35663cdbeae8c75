"""If a rank never makes a call, fails or dies in it, every other rank soon raises an error that says which and why."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.plan import Step
from symm_overlap.runtime import backend_of
from tests.collective import reference as ref
from tests.limits import SOON, Death
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import at, comparing

ops = torch.ops.symm_overlap
WORLD = 3


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


OPS: dict[str, Callable[[str], object]] = {
    "all_gather_matmul": lambda name: ops.fused_all_gather_matmul(ones(4, 6), [ones(6, 5)], 0, name),
    "matmul_reduce_scatter": lambda name: ops.fused_matmul_reduce_scatter(ones(6, 6), ones(6, 5), "sum", 0, name),
    "matmul_all_reduce": lambda name: ops.fused_matmul_all_reduce(ones(6, 6), ones(6, 5), "sum", name),
}


def good(me: Rank) -> None:
    """Make a correct call and compare its result exactly."""
    A, B = ref.binary((4, 6), torch.float32, seed=me.rank), ref.binary((6, 5), torch.float32, seed=9)
    whole = torch.cat([ref.binary((4, 6), torch.float32, seed=rank) for rank in range(me.world)])
    torch.testing.assert_close(ops.fused_all_gather_matmul(A, [B], 0, me.group_name)[1][0], whole @ B, rtol=0, atol=0)


# --- a rank that never calls


def one_never_calls(me: Rank, op: str, lane: int, check: bool, warm: bool) -> tuple[str, str, float, str]:
    """Return the error of each other rank in this call and in its next call."""
    good(me)  # in the first call of a group, ranks first find out whose memory they reach, which is another error
    with symm_overlap.lane(lane), symm_overlap.timeout(0.5), comparing(check):
        if warm:
            with symm_overlap.timeout(20):
                OPS[op](me.group_name)
        if me.rank == 1:
            return "", "", 0.0, me.group_name
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as raised:
            OPS[op](me.group_name)
        took = time.monotonic() - start
        with pytest.raises(RuntimeError) as again:
            OPS[op](me.group_name)
    return told(raised.value), str(again.value), took, me.group_name


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("warm", one_in(2, [True, False]))
@pytest.mark.parametrize("check", [True, False])
def test_a_rank_that_never_calls_is_named_after_the_deadline(
    ranks: Pool, fresh_lane: Callable[[], int], op: str, check: bool, warm: bool
) -> None:
    lane = fresh_lane()
    found = ranks.run(WORLD, one_never_calls, op, lane, check, warm)
    for rank, (message, again, seconds, name) in enumerate(found):
        if rank == 1:
            continue
        assert 0.4 < seconds < SOON
        assert "rank 1" in message
        assert op in message
        assert repr(name) in message
        if warm and not check:
            assert re.search(rf"rank {rank} of {WORLD}", message)
            assert re.search(r"channel \d", message)
            assert re.search(r"expected epoch \d+, found \d+", message)
            waited = re.search(r"did not signal after ([\d.]+) s", message)
            assert waited
            assert 0.5 <= float(waited[1]) < 2
        assert f"lane {lane} of group '{name}'" in again
        assert "out of step" in again
    ranks.run(WORLD, good)


def first_call_of_a_new_group(me: Rank, check: bool) -> str:
    group = dist.new_group(list(range(me.world)))
    if me.rank == 1:
        return ""
    with comparing(check), symm_overlap.timeout(0.5), pytest.raises(dist.DistBackendError) as raised:
        symm_overlap.all_gather(ones(4), 0, group)
    return told(raised.value)


@pytest.mark.parametrize("check", [True, False])
def test_a_rank_that_misses_the_first_call_of_a_group_is_named_too(ranks: Pool, check: bool) -> None:
    found = ranks.run(5, first_call_of_a_new_group, check)
    for rank, message in enumerate(found):
        assert rank == 1 or ("rank 1" in message and "all_gather" in message), found


# --- a rank that fails on its own


def twice(op: str, me: Rank) -> None:
    """Call twice: a rank may already have all its data for the call in which another rank fails."""
    OPS[op](me.group_name)
    OPS[op](me.group_name)


SIGNALS = {"all_gather_matmul": 1, "matmul_reduce_scatter": 2, "matmul_all_reduce": 3}
"""The number of signals that a rank sends in a pipelined call of three ranks."""

STEPS = [
    (op, kind, number)
    for op in OPS
    for kind, number in [
        *([("consume", 1)] if op == "all_gather_matmul" else [("produce", 0), ("produce", 2)]),
        *(("signal", number) for number in range(SIGNALS[op])),
        ("wait", 0 if op == "matmul_reduce_scatter" else 1),  # the last wait. A sum waits once for all parts.
    ]
]


def one_fails(me: Rank, op: str, lane: int, kind: str, number: int, check: bool) -> tuple[str, str, float]:
    """Return the error of this rank in the call in which rank 1 fails at some step, and in the next call."""

    def fail(step: Step) -> None:
        raise ArithmeticError(f"by request, at {step}")

    with symm_overlap.lane(lane), comparing(check), symm_overlap.force_path("pipelined"):
        OPS[op](me.group_name)
        start = time.monotonic()
        if me.rank == 1:
            with at(kind, number, fail), pytest.raises(ArithmeticError) as raised:
                OPS[op](me.group_name)
        else:
            with pytest.raises(dist.DistBackendError) as raised:
                twice(op, me)
        took = time.monotonic() - start
        with pytest.raises(RuntimeError, match=rf"lane {lane} .*out of step") as again:
            OPS[op](me.group_name)
    good(me)
    return told(raised.value), str(again.value), took


@pytest.mark.parametrize(("op", "kind", "number"), STEPS)
@pytest.mark.parametrize("check", [True, False])
def test_when_a_rank_fails_the_others_learn_it_at_once(
    ranks: Pool, fresh_lane: Callable[[], int], op: str, kind: str, number: int, check: bool
) -> None:
    found = ranks.run(WORLD, one_fails, op, fresh_lane(), kind, number, check)
    for rank, (message, again, seconds) in enumerate(found):
        assert seconds < 20  # far below the deadline of 300 s, even on a busy machine
        if rank == 1:
            assert "by request" in message
            assert f"{op}: ArithmeticError" in again
        else:
            assert re.search(r"rank 1 \(pid \d+\)", message), message
            assert re.search(r"failed|given up because of rank 1", message), message
            assert f"{op}: DistBackendError" in again


def a_matmul_fails_between_collectives(me: Rank, lane: int) -> None:
    """An error raised by a matmul is passed on unchanged. Only errors of the c10d backend become group errors."""
    A, B = ones(4, 6), ones(6, 5)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image")

    with symm_overlap.lane(lane), symm_overlap.force_path("c10d"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(backend_of("cpu")), "multiply", broken)
            with pytest.raises(RuntimeError, match=r"^no kernel image$") as raised:
                ops.fused_all_gather_matmul(A, [B], 0, me.group_name)
        assert not isinstance(raised.value, dist.DistBackendError)
        with pytest.raises(RuntimeError, match="out of step"):
            ops.fused_all_gather_matmul(A, [B], 0, me.group_name)
    good(me)


def test_an_error_of_a_matmul_is_not_taken_for_one_of_the_backend(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(WORLD, a_matmul_fails_between_collectives, fresh_lane())


# --- a rank that is interrupted


def one_is_interrupted(me: Rank, lane: int) -> float:
    """Return how long this rank takes to raise. Rank 1 gets Ctrl-C while it waits for its peers on two streams."""
    OPS["all_gather_matmul"](me.group_name)
    with symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=2, streams=2), comparing(False):
        OPS["all_gather_matmul"](me.group_name)
        if me.rank != 1:
            time.sleep(2)
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match=r"rank 1 .*has failed"):
                twice("all_gather_matmul", me)
            return time.monotonic() - start
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                OPS["all_gather_matmul"](me.group_name)
            return time.monotonic() - start
        finally:
            signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_call_on_every_stream_and_the_peers_learn_it(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    assert max(ranks.run(WORLD, one_is_interrupted, fresh_lane())) < 1.2
    ranks.run(WORLD, good)


# --- a rank that dies


def one_dies(me: Rank, op: str, kind: str, number: int, check: bool) -> tuple[str, str, float]:
    def die(step: Step) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with comparing(check), symm_overlap.force_path("pipelined"):
        OPS[op](me.group_name)
        start = time.monotonic()
        with at(kind, number, die) if me.rank == 1 else nullcontext(), pytest.raises(dist.DistBackendError) as raised:
            twice(op, me)
        took = time.monotonic() - start
        with pytest.raises(RuntimeError, match=r"lane 0 .*out of step") as again:
            OPS[op](me.group_name)
    return told(raised.value), str(again.value), took


@pytest.mark.parametrize(
    ("op", "kind", "number", "check"),
    [
        ("all_gather_matmul", "consume", 1, True),
        ("matmul_reduce_scatter", "produce", 1, False),
        ("matmul_all_reduce", "signal", 1, False),  # one peer has rank 1's partial sum, the other does not
    ],
)
def test_when_a_rank_dies_the_others_learn_it_at_once(
    fresh_ranks: Callable[..., Pool], op: str, kind: str, number: int, check: bool
) -> None:
    pool = fresh_ranks(WORLD)
    pid = pool.pid(1)
    found = pool.submit((0, 1, 2), one_dies, op, kind, number, check).outcomes()
    assert "killed by SIGKILL" in str(found[1].failure)
    for rank in (0, 2):
        assert found[rank].failure is None, found[rank].failure
        message, again, seconds = found[rank].value
        assert seconds < 20  # far below the deadline of 300 s, even on a busy machine
        assert f"rank 1 (pid {pid})" in message
        assert "is dead" in message
        assert op in message
        assert "lane 0 of group" in again


def one_dies_before_a_lane_is_used(me: Rank, check: bool, pid: int) -> tuple[str, float]:
    death = Death(pid)
    with comparing(check):
        OPS["all_gather_matmul"](me.group_name)
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with symm_overlap.lane(1), pytest.raises(dist.DistBackendError) as raised:
            OPS["all_gather_matmul"](me.group_name)
    return told(raised.value), death.seconds_ago()


@pytest.mark.parametrize("check", [True, False])
def test_a_rank_that_died_before_a_lane_had_any_memory_is_noticed_too(
    fresh_ranks: Callable[..., Pool], check: bool
) -> None:
    pool = fresh_ranks(WORLD)
    pid = pool.pid(1)
    found = pool.submit((0, 1, 2), one_dies_before_a_lane_is_used, check, pid).outcomes()
    for rank in (0, 2):
        assert found[rank].failure is None, found[rank].failure
        message, seconds = found[rank].value
        assert f"(pid {pid}) is dead" in message
        assert "rank 1" in message
        assert seconds < 1
