"""Tests of the rank pool: the guarantees on which other tests rely."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import leftovers
from tests.limits import SOON
from tests.ranks import Pool, Rank, RankError

ROOT = Path(__file__).resolve().parent.parent


def who(me: Rank, *extra: object, **named: object) -> tuple[object, ...]:
    return me.rank, me.world, dist.get_world_size(me.group), me.device.type, extra, named


def gather_ranks(me: Rank) -> list[int]:
    out = [torch.empty(1) for _ in range(me.world)]
    dist.all_gather(out, torch.tensor([float(me.rank)]), group=me.group)
    return [int(t) for t in out]


def tensor_of_rank(me: Rank) -> torch.Tensor:
    return torch.full((3,), me.rank, dtype=torch.bfloat16)


def fail_on(me: Rank, failing: list[int]) -> None:
    if me.rank in failing:
        raise ArithmeticError(f"made to fail on {me.rank}")


def fail_while_peers_wait(me: Rank) -> None:
    if me.rank == 0:
        raise ArithmeticError("the peers wait for this rank")
    dist.barrier(me.group)


def sleep_on(me: Rank, sleeping: list[int]) -> int:
    if me.rank in sleeping:
        oversleep()
    return os.getpid()


def oversleep() -> None:
    time.sleep(3600)


def die(me: Rank) -> None:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def variable(me: Rank, name: str) -> str | None:
    return os.environ.get(name)


def group_sizes(me: Rank) -> dict[tuple[int, ...], int]:
    return {members: dist.get_world_size(group) for members, group in me.groups.items()}


def threads(me: Rank) -> int:
    return torch.get_num_threads()


def alive(pid: int) -> bool:
    """True if the process is running. A zombie does not count, because the fork server may reap it a moment later."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_results_come_by_rank_from_a_group_of_that_size(ranks: Pool, world: int) -> None:
    assert ranks.run(world, who, "a", b=2) == [(r, world, world, "cpu", ("a",), {"b": 2}) for r in range(world)]
    assert ranks.run(world, gather_ranks) == [list(range(world))] * world


def test_tensors_come_back_by_value_and_outlive_the_processes(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2)
    tensors = pool.run(2, tensor_of_rank)
    pool.kill()
    assert [t.tolist() for t in tensors] == [[0.0] * 3, [1.0] * 3]
    assert not any(t.is_shared() for t in tensors)


def test_processes_live_from_call_to_call(ranks: Pool) -> None:
    assert ranks.run(2, sleep_on, []) == [ranks.pid(0), ranks.pid(1)]


def test_error_on_one_rank_names_it_with_its_traceback(ranks: Pool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)\Arank 2 of 4: Traceback.*in fail_on.*ArithmeticError: made to fail on 2"
    ) as e:
        ranks.run(4, fail_on, [2])
    assert list(e.value.failures) == [2]


def test_errors_on_several_ranks_are_all_shown(ranks: Pool) -> None:
    with pytest.raises(RankError) as e:
        ranks.run(3, fail_on, [0, 2])
    assert "made to fail on 0" in e.value.failures[0]
    assert "made to fail on 2" in e.value.failures[2]
    assert list(e.value.failures) == [0, 2]


def test_pool_is_new_after_an_error(ranks: Pool) -> None:
    before = ranks.run(2, sleep_on, [])
    with pytest.raises(RankError):
        ranks.run(2, fail_on, [0])
    after = ranks.run(2, sleep_on, [])
    assert not set(before) & set(after)
    assert ranks.run(5, gather_ranks) == [[0, 1, 2, 3, 4]] * 5


def test_hang_is_killed_with_every_stack_shown_and_the_pool_works_again(ranks: Pool) -> None:
    before = [ranks.pid(rank) for rank in range(5)]
    start = time.monotonic()
    with pytest.raises(RankError) as e:
        ranks.run(3, sleep_on, [0, 2], timeout=0.5)
    assert time.monotonic() - start < SOON
    assert list(e.value.failures) == [0, 2]
    for failure in e.value.failures.values():
        assert "still running after 0.5 s" in failure
        assert "in oversleep" in failure
        assert "in sleep_on" in failure
    assert not any(alive(pid) for pid in before)
    assert ranks.run(3, gather_ranks) == [[0, 1, 2]] * 3


def test_peers_of_a_failed_rank_are_not_waited_for_until_the_deadline(
    ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(RankError) as e:
        ranks.run(2, fail_while_peers_wait, timeout=600)
    assert time.monotonic() - start < SOON
    assert "the peers wait for this rank" in e.value.failures[0]
    assert "still running 0.5 s after rank 0 had failed" in e.value.failures[1]
    assert "in fail_while_peers_wait" in e.value.failures[1]


def makes_a_group(me: Rank) -> None:
    dist.new_group(list(range(me.world)))


def test_a_group_that_only_some_ranks_of_a_pool_make_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RankError, match="on some ranks of its pool"):
        ranks.run(2, makes_a_group)


def test_death_of_a_rank_is_reported_with_its_signal_and_stack(ranks: Pool) -> None:
    with pytest.raises(RankError) as e:
        ranks.run(2, die)
    failure = e.value.failures[1]
    assert "died: killed by SIGSEGV" in failure
    assert "in die" in failure[failure.index("Current thread") :]
    assert "SIGSEGV(11), PID" in failure, "the stacks in C++"


def writes_and(me: Rank, text: str, fails: bool) -> None:
    os.write(2, text.encode())
    if fails:
        raise ValueError("it failed")


def test_a_failure_is_reported_with_what_the_function_wrote_to_stderr(ranks: Pool) -> None:
    ranks.run(2, writes_and, "an earlier function", fails=False)
    with pytest.raises(RankError) as e:
        ranks.run(2, writes_and, "a device-side assertion", fails=True)
    assert "ValueError: it failed\n\nIts stderr:\na device-side assertion" in e.value.failures[1]
    assert "an earlier function" not in e.value.failures[1]


def test_a_rank_can_be_killed_while_its_function_runs(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2)
    running = pool.submit((0, 1), sleep_on, [1])
    os.kill(pool.pid(1), signal.SIGKILL)
    survivor, killed = running.outcomes(timeout=10)
    assert survivor.failure is None
    assert killed.failure is not None
    assert "killed by SIGKILL" in killed.failure


def test_ctrl_c_in_a_test_ends_its_ranks(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2)
    pids = [pool.pid(rank) for rank in range(2)]
    running = pool.submit((0, 1), sleep_on, [0, 1])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT by default
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            running.outcomes()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(alive(pid) for pid in pids)


def test_a_function_that_was_not_waited_for_does_not_answer_the_next_call(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2)
    pool.submit((0, 1), sleep_on, [0])
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] still run an earlier function"):
        pool.run(2, who)
    assert pool.run(2, gather_ranks) == [[0, 1]] * 2


def test_environment_of_fresh_ranks(ranks: Pool, fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2, environment={"GLOO_SOCKET_IFNAME": None, "PATH": None, "SYMM_OVERLAP_TEST": "x"})
    assert ranks.run(2, variable, "GLOO_SOCKET_IFNAME") == ["lo", "lo"]
    assert ranks.run(2, variable, "PATH") == [os.environ["PATH"]] * 2
    assert pool.run(2, variable, "GLOO_SOCKET_IFNAME") == [None, None]
    assert pool.run(2, variable, "PATH") == [None, None]
    assert pool.run(2, variable, "SYMM_OVERLAP_TEST") == ["x", "x"]


def test_groups_of_fresh_ranks_may_overlap(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(3, groups=[(0, 1), (1, 2)])
    everyone = {(0, 1, 2): 3}
    assert pool.run(3, group_sizes) == [
        everyone | {(0, 1): 2},
        everyone | {(0, 1): 2, (1, 2): 2},
        everyone | {(1, 2): 2},
    ]
    assert pool.submit((1, 2), gather_ranks).results() == [[0, 1]] * 2
    with pytest.raises(ValueError, match=r"no group of ranks \(0,\)"):
        pool.run(1, who)


def test_ranks_compute_on_one_thread(ranks: Pool) -> None:
    assert ranks.run(2, threads) == [1, 1]


@pytest.mark.slow
def test_ranks_end_when_pytest_is_killed() -> None:
    program = (
        "import sys; from tests import ranks; from tests.test_ranks import sleep_on\n"
        "ranks.PRELOADED = ['tests.rank_process']  # the others would take seconds to import, and are not needed\n"
        "pool = ranks.Pool(2); pool.submit((0, 1), sleep_on, [0, 1])\n"
        "print(pool.pid(0), pool.pid(1), flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_process_and_shared_memory_left_behind_are_found() -> None:
    memory = leftovers.SHARED_MEMORY / f"symm_overlap_test_{os.getpid()}"
    process = subprocess.Popen(["sleep", "60"])
    try:
        with memory.open("w"):
            assert memory.name not in leftovers.shared_memory(), "memory that is open counts as left behind"
        assert memory.name in leftovers.shared_memory()
        assert process.pid in leftovers.processes()
    finally:
        process.kill()
        process.wait()
        memory.unlink()
    assert process.pid not in leftovers.processes()
    assert memory.name not in leftovers.shared_memory()
