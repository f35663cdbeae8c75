"""The state of a process group: its ranks, whether they can reach each other's memory, and its lanes."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._torch import is_fake
from .call_lock import CallLock
from .costs import Device
from .lane import Lane

_OWN_LANES_FROM = 1 << 21  # lanes that programs choose have much smaller numbers


class GroupState:
    """The state of one process group. It lives as long as the group, and does not keep it alive.

    Attributes:
        name, rank, world: the name of the group, the rank of this process in it, and its world size.
        fake: whether the group has no other processes: torch's "fake" back end, for work on graphs.
        calls: for each lane, how many calls this rank has made, including those that were rejected.
        direct: for each kind of device, whether all ranks can reach each other's memory; see `topology`.
        devices: for each kind of device, the devices of all ranks. They are known as soon as ``direct`` is.
        lane_groups: for each lane except lane 0, the group whose collectives it uses; see `lane_group`.
        alone: whether there are no peers to communicate with.
        tuned: for kinds of devices and of calls, what the group has measured; `collective.tuning` fills it.
        symmetric: for memory allocated by `symm_overlap.empty`, the number of the group's rendezvous that it took part
            in.
        rendezvous_numbers: the number of the next rendezvous, and of those after it.
        routes: how calls have been carried out, for later calls of the same kind; `collective.exchange.route` fills it.
        repeated: what is known of calls that may be repeated; `collective.exchange.repeated` fills it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name, self.rank, self.world = group.group_name, group.rank(), group.size()
        self.fake = is_fake(group)
        self.alone = self.fake or self.world == 1
        self.routes: dict[Hashable, Any] = {}
        self.repeated: dict[Hashable, Any] = {}
        self.tuned: dict[tuple[str, str], Any] = {}
        self.calls: defaultdict[int, int] = defaultdict(int)
        self.symmetric: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self.rendezvous_numbers = itertools.count(1)
        self.direct: dict[str, bool] = {}
        self.devices: dict[str, tuple[Device, ...]] = {}
        self.lane_groups: dict[int, dist.ProcessGroup] = {}
        # One lock for each kind of device: several threads may ask about two kinds in different orders on different
        # ranks.
        first = f"the first call of group {self.name!r}", "make one call of the group before a handler may make one"
        self.exchange_locks: defaultdict[str, CallLock] = defaultdict(lambda: CallLock(*first))
        self._lock = threading.RLock()  # a signal handler may make the first call on a lane too
        self._lanes: dict[tuple[torch.device, int], Lane] = {}
        self._own_lanes = itertools.count(_OWN_LANES_FROM)
        self._pid = os.getpid()

    def forget_routes(self) -> None:
        """Decide anew how the next call of each kind is carried out."""
        self.routes.clear()
        self.repeated = {}  # a call that has begun before adds to the old one

    def device(self, kind: str) -> Device | None:
        """Return the device that all ranks assume for every rank: the first rank's, with stream waits and kernels if
        all ranks have them. None before `topology.direct_access` was called for this kind.
        """
        found = self.devices.get(kind)
        if found is None:
            return None
        return Device(found[0].name, all(each.stream_waits for each in found), all(each.kernels for each in found))

    def lane(self, group: dist.ProcessGroup, device: torch.device, index: int) -> Lane:
        """Return lane ``index`` of the group on a device; create it on first use."""
        lane = self._lanes.get((device, index))
        if lane is None:
            with self._lock:
                lane = self._lanes.get((device, index))
                if lane is None:
                    lane = self._lanes.setdefault((device, index), Lane(group, device, index, self._pid))
        return lane

    def own_lane(self, group: dist.ProcessGroup, device: torch.device) -> Lane:
        """Return a new lane, for a feature whose calls have separate memory. It lives as long as the caller keeps it.

        Every rank must create these lanes of a group in the same order, because they are numbered in that order.
        """
        return Lane(group, device, next(self._own_lanes), self._pid)


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
_lock = threading.RLock()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of ``group``; create it on first use."""
    state = _states.get(group)
    if state is None:
        with _lock:
            state = _states.get(group)
            if state is None:
                state = _states.setdefault(group, GroupState(group))
    return state
