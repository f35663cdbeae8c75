"""A process group for each lane, for the collectives of torch.distributed that the lane calls.

The collectives of one group are matched by the order of calls. Threads on several lanes do not call in the same order
on every rank, so with one group, rank 0's lane 1 would exchange data with rank 1's lane 2, or gloo would end the
process because sizes differ.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from .. import _C
from .._torch import device_types_of, gloo_group
from .group import GroupState
from .lane import name_of_lane

_LOOK_EVERY = 0.1
"""Seconds between two looks for ranks that have died, while a group is being made."""

_SLACK = 0.2
"""Seconds after the deadline in which torch may still say why the group was not made."""


def lane_group(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """Return the group whose collectives lane ``lane`` of ``group`` uses. The lane's first call of this is collective.

    Lane 0 uses ``group`` itself. On CUDA, the other lanes do not call the collectives of torch.distributed.

    Raises:
        DistBackendError: a rank has died, or not all ranks have come before the deadline of ``seconds``.
    """
    if lane == 0:
        return group
    known = state.lane_groups.get(lane)
    if known is None:  # one thread at a time uses a lane, so no other thread creates this group now
        known = state.lane_groups[lane] = _made(state, group, lane, seconds)
    return known


def _made(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """Make the group of a lane, and look for dead ranks meanwhile. Torch itself would wait for them until the deadline,
    in the store, so another thread waits there. After an error, that thread is left behind. If all ranks have come, but
    one of them has given up already, gloo tries to connect to it for several times the deadline.
    """
    found: Future[dist.ProcessGroup] = Future()
    began = time.monotonic()
    name = f"symm_overlap/{state.name}/lane {lane}"
    where = f"symm_overlap: the group of {name_of_lane(lane)} of {state.name!r}"

    def make() -> None:
        try:
            found.set_result(gloo_group(group, name, timedelta(seconds=seconds)))
        except BaseException as error:
            found.set_exception(error)

    Thread(target=make, name=name, daemon=True).start()
    why = f"{where} was not made within {seconds:g} s, because not all ranks came in time"
    while not wait([found], _LOOK_EVERY).done:
        _require_living(state, where)
        if time.monotonic() - began > seconds + _SLACK:
            raise dist.DistBackendError(why)
    error = found.exception()
    if isinstance(error, (RuntimeError, TimeoutError)):
        why = why if time.monotonic() - began >= 0.9 * seconds else f"{where} was not made"
        raise dist.DistBackendError(f"{why}: {error}") from error
    return found.result()


def _require_living(state: GroupState, where: str) -> None:
    for peer in range(state.world):
        if peer != state.rank and (why := _C.death_of(state.name, peer)):
            raise dist.DistBackendError(
                f"{where} cannot be made: rank {peer} {why}. Its own output says why it ended; this group cannot go on."
            )


def message_group(state: GroupState, group: dist.ProcessGroup, lane: int, seconds: float) -> dist.ProcessGroup:
    """Return the group for the point-to-point messages of lane ``lane``: the lane's group of gloo if ``group`` is on
    gloo, or if it carries out all messages of a rank one after another. Otherwise ``group``.

    A group of the lane has the lane's deadline, and its messages do not mix with other messages of the caller.
    """
    if dist.get_backend(group) != "gloo" and not _has_one_queue(group):
        return group
    return lane_group(state, group, lane, seconds)


def _has_one_queue(group: dist.ProcessGroup) -> bool:
    """True if all messages of a rank are in one queue: NCCL has only one communicator for the whole group if
    ``init_process_group`` was called with ``device_id``. A message to one rank then waits for one to another rank.
    """
    groups = (group, dist.group.WORLD)
    return any(getattr(each, "bound_device_id", None) is not None for each in groups)


def are_enqueued(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the group enqueues messages from ``device`` on a stream, as NCCL does, so that the host does not have to
    wait for them. The first message from one rank to another makes the connection, and then the host does wait.
    """
    return wire_device(group, device).type != "cpu"


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device on which tensors of ``device`` must be stored for the group to send them. It is ``device``
    itself, or the CPU for a group that cannot send from ``device`` (gloo with tensors on a GPU).
    """
    return device if device.type in device_types_of(group) else torch.device("cpu")
