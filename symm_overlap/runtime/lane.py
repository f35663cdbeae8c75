"""Lanes. A lane is a sequence of calls of one group on one device. This module also handles calls that fail.

Calls on one lane run one after another, and every rank must issue them in the same order, as with any collective. Ops
that are to be in flight at the same time, from several threads or CUDA streams, need a lane each. Lanes share neither
memory nor channels, so they cannot disturb one another.

A lane's workspace is double buffered: calls use the two halves in turn. In each call, a rank signals every peer after
its own previous call has ended, and waits for every peer. So when a rank starts call k+2, it has received every peer's
signal of call k+1. Hence every peer has finished call k, the last call that used the same half. Every call may
therefore lay out its half anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..plan import Region
from .backend import Workspace
from .backends import backend_of
from .call_lock import CallLock
from .script import Script

_MOST_KEPT = 256  # kinds of calls


def lane_of_pipelines(index: int) -> int:
    """Return the index of the lane of pipelines that the user calls ``index``. It is below 0, and those of the ops are
    not.
    """
    return -1 - index


def name_of_lane(index: int) -> str:
    """Return how to name a lane to the user, who gives the lanes of pipelines and those of ops the same numbers."""
    return f"lane {index}" if index >= 0 else f"lane {-1 - index} of pipelines"


class NotCapturedError(RuntimeError):
    """A call was rejected before it began, because it cannot be part of the CUDA graph that is being captured."""


class NotPreparedError(NotCapturedError):
    """What the call needs cannot be allocated during the capture."""


class CaptureFailedError(NotCapturedError):
    """The capture has failed."""


@dataclass(slots=True)
class Kept:
    """A cache of what calls of one kind have created for one half of the workspace, for later calls of the same kind.

    Attributes:
        views: tensors at regions of the workspace.
        script: see `Workspace.script`; None if there is none, or not yet.
    """

    views: dict[Region, Tensor] = field(default_factory=dict)
    script: Script | None = None
    _scripted: bool = False

    def script_by(self, make: Callable[[], Script | None]) -> Script | None:
        """Return the script, which ``make`` returns the first time."""
        if not self._scripted:
            self.script, self._scripted = make(), True
        return self.script


class KeepsViews(Protocol):
    """Keeps views of a lane's workspace."""

    def forget(self) -> None:
        """Forget them: the workspace grows, and its old memory is to be freed."""


class Lane:
    """One sequence of calls of one group on one device.

    Args:
        pid: the process that is this rank of the group. A process forked from it is not, and may not make calls.

    Attributes:
        generation: how often the workspace has grown.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, index: int, pid: int) -> None:
        self.group_name, self.device, self.index = group.group_name, device, index
        self.rank, self.world = group.rank(), group.size()
        self.calls = 0  # calls that have run; the same on every rank
        self.broken: str | None = None
        self.generation = 0
        self._views: WeakSet[KeepsViews] = WeakSet()
        self._kept: dict[tuple[object, ...], Kept] = {}
        self._pid = pid
        self._tag = f"{device.type} lane {index}"
        backend = backend_of(device.type)
        self.workspace: Workspace = backend.workspace(group, device, index, self._tag)
        another = "make the other call on another lane (symm_overlap.lane), on every rank"
        self.lock = self.workspace.guarded(CallLock(f"a call on {name_of_lane(index)}", another))
        method = WeakMethod(self._abandon)  # the streams must not keep the lane alive

        def abandon() -> None:
            if (end_waits := method()) is not None:
                end_waits()

        self.streams = backend.streams(device, abandon)

    def run(
        self,
        op: str,
        body: Callable[[int], _C.Flags | None],
        outputs: Sequence[Tensor],
        *,
        nbytes: int,
        channels: int,
        seconds: float,
        call_hash: int,
        by_kernels: bool = False,
        fits: Callable[[int], bool] | None = None,
    ) -> bool | None:
        """Run one call: ``body(half)``, with ``nbytes`` of workspace in that half, and signals on ``channels``
        channels. Return False if the call was only captured, else True.

        Args:
            body: returns the flags that the call has used (csrc/issue/flags.h), or None.
            outputs: the tensors that the call writes. After a failed wait on a GPU, they are filled with NaN.
            seconds, call_hash, by_kernels: see `Workspace.begin`.
            fits: if given, the call runs only if ``fits(half)`` is True, for the half that the call would use. If not,
                None is returned, and nothing was done. Not for calls that are captured.

        Raises:
            RuntimeError: an earlier call on this lane failed, or this process was forked from the rank's process.
            NotPreparedError: the workspace has to grow while a CUDA graph is being captured; call `prepare` before.
            CaptureFailedError: the capture has failed. The lane stays in step: nothing of the capture will ever run.
        """
        workspace = self.workspace
        nbytes = max(1, nbytes)  # a call that needs no memory still needs its channels
        if nbytes > workspace.half or channels > workspace.channels:
            workspace.require_preparable(
                f"{op} needs {nbytes} bytes of workspace and {channels} channels, but the lane has "
                f"{workspace.half} and {workspace.channels}"
            )
        self.require_own_process()  # first: another thread may have held the lock when the process was forked
        with self.lock:
            if fits is not None and not fits(self.calls % 2):
                return None
            self._require_unbroken()
            try:
                if nbytes > workspace.half or channels > workspace.channels:
                    self._grow(op, nbytes, channels, seconds, call_hash)
                workspace.begin(op, seconds, call_hash, self.calls, by_kernels)
                flags = body(workspace.take_half(self.calls))
                ran = workspace.end(outputs, flags)
                self.calls += ran
            except CaptureFailedError:
                raise
            except BaseException as error:
                self.give_up(op, error)
                raise
        return bool(ran)

    def kept(self, *call: Hashable) -> Kept:
        """Return the cache of calls like ``call``. It stays valid until the workspace grows."""
        key = (*call, torch.is_inference_mode_enabled())  # inference mode needs views of its own
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = Kept()
        return found

    def tell_when_it_grows(self, keeper: KeepsViews) -> None:
        """Call ``keeper.forget()`` whenever the workspace grows, as long as somebody else keeps ``keeper`` alive."""
        with self.lock:
            self._views.add(keeper)

    @contextmanager
    def turn(self, op: str) -> Iterator[None]:
        """Hold the lane for one call that does not read or write the workspace. If that call fails, the lane is broken,
        as peers may be in the middle of the call.

        Raises:
            RuntimeError: see `run`.
        """
        self.require_own_process()
        with self.lock:
            self._require_unbroken()
            try:
                yield
            except BaseException as error:
                self.give_up(op, error)
                raise

    def _grow(self, op: str, nbytes: int, channels: int, seconds: float, call_hash: int) -> None:
        workspace = self.workspace
        # A peer that is in another call, for which its workspace need not grow, would wait for a signal from this rank
        # and never reach the rendezvous for new memory. `begin` tells it that the calls differ.
        workspace.begin(op, seconds, call_hash, self.calls)
        self._kept = {}
        self.generation += 1
        for each in self._views:
            each.forget()
        try:
            workspace.grow(max(nbytes, workspace.half), max(channels, workspace.channels))
        except dist.DistBackendError as error:
            raise dist.DistBackendError(f"{op}: {error}") from None
        except ValueError as error:  # ranks need different sizes: every rank raises
            raise dist.DistBackendError(
                f"{op}: {error} Set SYMM_OVERLAP_CHECK=1 on every rank to see whether all make the same call."
            ) from None

    def reserve(self, nbytes: int, seconds: float, call_hash: int, op: str = "prepare", channels: int = 1) -> None:
        """Grow the workspace, if needed, for calls that use ``nbytes`` of a half and signal on ``channels`` channels.
        Collective if the workspace has to grow.

        Raises:
            RuntimeError: see `run`. Memory runs out on this rank or (`torch.distributed.DistBackendError`) on another.
        """
        with self.turn(op):
            if max(1, nbytes) > self.workspace.half or channels > self.workspace.channels:
                self._grow(op, max(1, nbytes), channels, seconds, call_hash)
                self.calls += 1  # a separate number, so that the peers' next call is not compared with this one

    def exchange(self, op: str, mine: object, seconds: float, call_hash: int) -> list[Any]:
        """Return what every rank passes as ``mine``, data for JSON. Collective. A peer that makes another call on the
        lane gets an error, as it does from `run`.

        Raises:
            RuntimeError: see `run`.
        """
        with self.turn(op):
            self.workspace.begin(op, seconds, call_hash, self.calls)
            try:
                said = _C.exchange(self.group_name, "rendezvous", json.dumps(mine), self._tag)
            except dist.DistBackendError as error:
                raise dist.DistBackendError(f"{op}: {error}") from None
            # A number of its own, as in `reserve`. It counts twice, because a GPU may still be in the previous call,
            # whose half of the workspace the next call must not use.
            self.calls += 2
        return [json.loads(text) for text in said]

    def require_in_step(self) -> None:
        """Raise RuntimeError if no further call is possible: an earlier call failed, or this process was forked from
        the rank.
        """
        self.require_own_process()
        self._require_unbroken()

    def _require_unbroken(self) -> None:
        if self.broken is not None:
            raise RuntimeError(
                f"{name_of_lane(self.index)} of group {self.group_name!r} is out of step with its peers since a call "
                f"failed ({self.broken}). Make a new group, or use another lane (symm_overlap.lane), on every rank."
            )

    def require_own_process(self) -> None:
        """Raise RuntimeError if this process was forked from the rank."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this process was forked from rank {self.rank} of group {self.group_name!r} (pid {self._pid}), and "
                "cannot make calls for that rank: start ranks, and workers that call ops, with spawn, not fork"
            )

    def give_up(self, op: str, error: BaseException) -> None:
        """Break the lane after a failed call, and end the waits of peers that may be in the middle of that call."""
        self.broken = f"{op}: {type(error).__name__}"
        self.workspace.give_up(op)
        with suppress(RuntimeError):  # the group no longer exists
            # A peer that has finished the call, or that is in another call, may come to the rendezvous for new memory.
            reason = f"its lane broke in {self.broken}: {str(error).partition(chr(10))[0]}"
            _C.refuse_rendezvous(self.group_name, self._tag, reason)

    def _abandon(self) -> None:
        self.workspace.give_up("")

    def why_gone(self, peer: int) -> str:
        """Return why no more signals will come from ``peer`` on this lane; empty as long as some may still come."""
        return self.workspace.why_gone(peer)
