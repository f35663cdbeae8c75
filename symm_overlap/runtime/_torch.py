"""What ranks need of torch that is private to meet for symmetric memory on a GPU. Checked on torch 2.11.0.

torch numbers the messages of a rendezvous by those that the process has sent in all its groups (pytorch issue 196082).
Ranks that have met in different groups before, such as those of different stages of a pipeline, then wait for each
other's messages until the store's time-out. Here each group has a second name, under which torch finds a store that
numbers its messages by themselves.
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
    """The store of a group, with messages numbered as the group has sent them: keys are ".../NUMBER/RANK". Any other
    key, as a torch that numbers otherwise may have, stays as it is.
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
    """The name of a group to hand to torch's rendezvous of CUDA tensors."""
    if (known := _groups.get(group)) is not None:
        return known[0]
    if symm_mem.get_backend(torch.device("cuda")) != "CUDA":
        return group.group_name  # NCCL's and NVSHMEM's symmetric memory ask more of a group than its store
    name, store = _c10d.GroupName(f"{group.group_name} of symm_overlap"), _OwnNumbers(group_store(group))
    second = dist.ProcessGroup(store, group.rank(), group.size())
    _unregister_process_group(name)  # that of an earlier group of this name
    _register_process_group(name, second)
    _groups[group] = name, second, store  # torch does not keep them
    return name
