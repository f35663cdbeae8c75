"""The private torch APIs that a rendezvous for symmetric memory on a GPU needs. Checked on torch 2.11.0.

torch numbers the messages of a rendezvous with one count for the whole process, over all its groups (pytorch issue
196082). Ranks that have met in different groups before, such as ranks of different pipeline stages, then disagree on
the numbers and wait for each other's messages until the store's time-out. To avoid that, each group is registered here
under a second name. Under that name torch finds a store that counts the messages of this group alone.
"""

from __future__ import annotations

import re
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as _c10d

from .._torch import group_store, symm_mem

__all__ = ["rendezvous_name"]


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
