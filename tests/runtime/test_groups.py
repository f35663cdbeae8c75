"""Symmetric memory belongs to a group: several groups over one tensor, a group that is created again, and a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap._torch import symm_mem
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, make


def overlapping_groups(me: Rank, names: list[tuple[int, ...]]) -> None:
    """Use one tensor in several groups. Each has its own ranks, pads, signals and barriers. They share the buffer."""
    tensor = symm_mem.empty(8, device="cpu").fill_(me.rank)
    handles = {name: symm_mem.rendezvous(tensor, me.groups[name]) for name in names if name in me.groups}
    assert len({handle.signal_pad_ptrs[handle.rank] for handle in handles.values()}) == len(handles)
    for name, handle in handles.items():
        assert symm_mem.rendezvous(tensor, me.groups[name]) is handle
    everyone = handles[tuple(range(me.world))]
    for name, handle in handles.items():
        assert (handle.rank, handle.world_size) == (name.index(me.rank), len(name))
        for place, rank in enumerate(name):
            assert handle.get_buffer(place, (8,), torch.float32).eq(rank).all()
        handle.get_signal_pad(handle.rank).fill_(len(name) + 10 * me.rank)
    everyone.barrier()
    for name, handle in handles.items():
        for place, rank in enumerate(name):
            assert handle.get_signal_pad(place).eq(len(name) + 10 * rank).all(), "a pad belongs to one group"
    for name, handle in handles.items():  # a signal in one group does not arrive in the others; rank numbers differ
        for place in range(len(name)):
            handle.put_signal(place, channel=1)
        for _ in name:
            handle.barrier(channel=1)
        others = [h for h in handles.values() if h is not handle]
        for other in others:
            assert error_of(other.wait_signal, other.rank, channel=1, timeout_ms=5)[0] == "DistBackendError"
        for place in range(len(name)):
            handle.wait_signal(place, channel=1)
    everyone.barrier()


def group_made_again(me: Rank) -> None:
    """Create a group again under the same name while the old handle is still in use. The ranks have swapped numbers."""
    tensor, old = make(me.group, 4)
    tensor.fill_(me.rank)
    store = dist.distributed_c10d._get_default_store()
    name = me.group_name
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=1 - me.rank, world_size=2)
    assert dist.group.WORLD.group_name == name
    new = symm_mem.rendezvous(tensor, dist.group.WORLD)
    assert (old.rank, new.rank) == (me.rank, 1 - me.rank)
    assert new.get_buffer(1, (4,), torch.float32).eq(0).all()
    new.barrier()
    old.barrier()  # still works between the ranks that hold it


def fork_leaves_the_parent_alone(me: Rank) -> None:
    tensor, handle = make(me.group, 4)
    tensor.fill_(me.rank)
    handle.barrier()
    child = os.fork()
    if child == 0:
        del tensor, handle  # as in a data-loader worker that ends
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    handle.barrier()
    peer = (me.rank + 1) % me.world
    assert handle.get_buffer(peer, (4,), torch.float32).eq(peer).all()
    handle.barrier()


class InPython(dist.ProcessGroup):
    """A process group without a store of its own. It passes calls on to gloo."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self.gloo = dist.ProcessGroupGloo(store, rank, world, timeout)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "in Python"

    @property
    def group_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
        return self.gloo.allreduce(tensors, options)


def written_in_python(me: Rank) -> None:
    dist.Backend.register_backend("symm_overlap_test", InPython, devices=["cpu"])
    no_store = r"this process group has no store .*written in Python"
    for path, reason in ((nullcontext(), no_store), (symm_overlap.force_path("c10d"), f"{no_store}|No backend type")):
        group = dist.new_group(backend="symm_overlap_test")
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2, 2]
        with path, pytest.raises(dist.DistBackendError, match=reason):
            symm_overlap.all_reduce(torch.ones(2), "sum", group)


def test_groups_over_one_tensor_do_not_meet(fresh_ranks: Callable[..., Pool]) -> None:
    """Signals and barriers of groups that share a tensor do not mix."""
    groups = [(0, 1), (1, 2), (0, 2)]
    pool = fresh_ranks(3, groups=groups)
    pool.run(3, overlapping_groups, [(0, 1, 2), *groups])


def test_a_group_made_again_under_the_same_name_is_another_group(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, group_made_again)


def test_a_forked_child_does_not_disturb_its_parent(ranks: Pool) -> None:
    ranks.run(2, fork_leaves_the_parent_alone)


def test_a_group_written_in_python_is_refused(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, written_in_python)
