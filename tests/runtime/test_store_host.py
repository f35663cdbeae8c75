"""If the rank that hosts the group's store ends, the other ranks raise an error of one line that names this rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap import _C
from tests.limits import SOON
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, make

Errors = dict[str, tuple[str, str, float]]


def group_on_a_store_of_rank_0(me: Rank) -> dist.ProcessGroup:
    """Replace the default group by a new one of all ranks, whose store is hosted by rank 0. Return the new group."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if me.rank == 0 else None
    port = int(_C.exchange(me.group_name, "port", str(host.port if host else ""))[0])
    store = host or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def host_ends(me: Rank, known: bool, waiting: bool) -> Errors:
    """Rank 0 ends before the others come to a meeting, or while they wait in it. Return the errors of the others.

    Args:
        known: whether the ranks have met before.
        waiting: whether the others already wait when rank 0 ends. If not, rank 0 reports a failure before it ends.
    """
    group = group_on_a_store_of_rank_0(me)
    name = group.group_name
    if known:
        _C.exchange(name, "first meeting", "")
    if me.rank == 0:
        time.sleep(0.5 if waiting else 0.1)
        if not waiting:
            _C.refuse_rendezvous(name, "another tag", "it has failed")
        os._exit(1)
    if not waiting:
        time.sleep(0.5)
    errors = {"exchange": error_of(_C.exchange, name, "purpose of this test", "")}
    errors["rendezvous"] = error_of(make, group, 1)
    if not known:
        errors["refusal"] = error_of(_C.refuse_rendezvous, name, "tag", "reason")
        errors["look"] = error_of(_C.death_of, name, 0)
    else:
        _C.refuse_rendezvous(name, "tag", "reason")  # asks the store nothing
        assert _C.death_of(name, 0), "ranks that have met can still report the death of a peer"
    return errors


@pytest.mark.parametrize("waiting", one_in(2, [False, True], first=1), ids=["before", "during"])
@pytest.mark.parametrize("known", [False, True], ids=["strangers", "known"])
def test_the_end_of_the_stores_host_is_one_line_that_names_it(
    fresh_ranks: Callable[..., Pool], known: bool, waiting: bool
) -> None:
    pool = fresh_ranks(3)
    pid = pool.pid(0)
    for survivor in pool.submit((0, 1, 2), host_ends, known, waiting).outcomes(timeout=50)[1:]:
        assert survivor.failure is None, survivor.failure
        assert "purpose of this test of group '" in survivor.value["exchange"][1]
        for what, (kind, message, seconds) in survivor.value.items():
            assert kind == "DistBackendError", (what, message)
            assert "\n" not in message
            assert "group '" in message
            if known:
                assert f"rank 0 (pid {pid}) is dead" in message
            else:
                assert f"rank 0 (pid {pid}) is dead" in message or "the process that hosts the group's store" in message
            assert seconds < SOON


def host_leaves_a_fork(me: Rank) -> tuple[str, float]:
    """Rank 0 dies, but a process that was forked from it, as a data loader's workers are, keeps the store's sockets."""
    group = group_on_a_store_of_rank_0(me)
    symm_overlap.all_reduce(torch.ones(2), "sum", group)
    child = os.fork() if me.rank == 0 else 0
    if me.rank == 0 and child == 0:
        time.sleep(4 * SOON)
        os._exit(0)
    child = int(_C.exchange(group.group_name, "the fork", str(child))[0])
    if me.rank == 0:
        time.sleep(0.5)  # the other rank reads the child's pid
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        symm_overlap.all_reduce(torch.ones(2), "sum", group)
    seconds = time.monotonic() - begin
    os.kill(child, signal.SIGKILL)
    return str(error.value), seconds


def test_a_fork_of_the_stores_host_does_not_keep_the_others_waiting(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(2, environment={"SYMM_OVERLAP_CHECK": None})  # which would use the store in every call
    pid = pool.pid(0)
    _, survivor = pool.submit((0, 1), host_leaves_a_fork).outcomes(timeout=50)
    assert survivor.failure is None, survivor.failure
    message, seconds = survivor.value
    assert f"rank 0 (pid {pid}) is dead" in message
    assert seconds < SOON
