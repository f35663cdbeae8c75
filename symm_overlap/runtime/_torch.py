"""The private torch APIs that only the runtime uses: for groups on gloo, and for a rendezvous for symmetric memory on a
GPU. Checked on torch 2.11.0 and 2.13.0.

torch numbers the messages of a rendezvous with one count for the whole process, over all its groups (pytorch issue
196082). Ranks that have met in different groups before, such as ranks of different pipeline stages, then disagree on
the numbers and wait for each other's messages until the store's time-out. To avoid that, each group is registered here
under a second name. Under that name torch finds a store that counts the messages of this group alone.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as _c10d

from .._torch import group_store, symm_mem

__all__ = ["device_types_of", "gloo_group", "rendezvous_name"]

_NUMBERED = re.compile(r"(.*)/(\d+)/(\d+)")


class _OwnNumbers(Store):
    """The store of a group, with messages numbered by the group's own count. Keys of messages are ".../NUMBER/RANK".
    Any other key is passed on unchanged, for versions of torch that number messages in another way.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _own(self, key: str) -> str:
        found = _NUMBERED.fullmatch(key)
        if found is None:
            return key
        rest, number, rank = found.groups()
        return f"{rest}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"

    def set(self, key: str, value: str) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        own = [self._own(key) for key in keys]
        self._store.wait(own) if timeout is None else self._store.wait(own, timeout)


_groups: WeakKeyDictionary[dist.ProcessGroup, tuple[_c10d.GroupName, dist.ProcessGroup, Store]] = WeakKeyDictionary()


def rendezvous_name(group: dist.ProcessGroup) -> _c10d.GroupName:
    """Return the group name to pass to torch's rendezvous of CUDA tensors."""
    if (known := _groups.get(group)) is not None:
        return known[0]
    if symm_mem.get_backend(torch.device("cuda")) != "CUDA":
        return group.group_name  # the symmetric memory of NCCL and NVSHMEM needs more of a group than its store
    name, store = _c10d.GroupName(f"{group.group_name} of symm_overlap"), _OwnNumbers(group_store(group))
    second = dist.ProcessGroup(store, group.rank(), group.size())
    _unregister_process_group(name)  # an earlier group may have had this name
    _register_process_group(name, second)
    _groups[group] = name, second, store  # torch keeps no reference to them
    return name


_network: list[Any] = []
"""The network devices of all groups that `gloo_group` creates in this process.

A device has a thread that wakes up a hundred times a second. Torch would create devices for every group.
"""


def gloo_group(group: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create another group of the ranks of ``group``, on gloo. Collective among calls with this name, in any thread.

    ``torch.distributed.new_group`` is not used, because every rank of the world has to call it, in one order.
    """
    # gloo waits in the store. With a connection of its own, it does not make the groups of other threads wait.
    store = _c10d.PrefixStore(name, group_store(group).clone())  # type: ignore[attr-defined]
    made = dist.ProcessGroup(store, group.rank(), group.size())
    backend = _gloo(store, group, timeout)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


def _gloo(store: Store, group: dist.ProcessGroup, timeout: timedelta) -> Any:
    if not _network:  # torch knows which network to use
        first: Any = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
        _network[:] = first.options._devices
        return first
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices = timeout, _network
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), options)


def device_types_of(group: dist.ProcessGroup) -> set[str]:
    """Return the types of devices whose tensors the group can send."""
    return {device.type for device in group._device_types}
