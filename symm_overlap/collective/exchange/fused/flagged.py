"""The part that all runs of fused plans share: the flags of a lane, and the handling of a kernel when a call fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from .... import _C
from ....kernels import load
from ....kernels._triton import NotLoadedError, load_ahead, require_loaded
from ....kernels.configuration import INTERPRETER, programs, require_known
from ....kernels.flags import Caller, Expired, Flags
from ....kernels.place import Machine, Place
from ....kernels.tile_order import chunks_without_tiles
from ....plan import Step, Table
from ....runtime import AwaitFlag, Lane, Launch, NotPreparedError, RaiseFlag, Work
from ..bounds import bounds
from ..call import Call
from .stand_in import stand_ins

_flags: WeakKeyDictionary[Lane, tuple[Flags, Flags]] = WeakKeyDictionary()
"""For each lane, the flags of calls that run at once, and those of calls that are captured. One set is enough for all
calls of its kind, because calls on one lane run one after another.
"""

_flags_guard = threading.Lock()

Operands = tuple[tuple[Any, ...], Tensor | None]
"""(arguments of a kernel's launcher before its flags, scales of the rows or None)."""

_SLACK = 2.0
"""A kernel waits longer than the copies by this factor, so that the copies, whose errors say more, fail first."""


def flags_of(call: Call, count: int, captured: bool) -> Flags:
    """Return the flags of a call's lane. They are allocated for the lane's first call that needs flags.

    Args:
        captured: whether the flags are for captured calls.

    Raises:
        NotPreparedError: there are fewer than ``count`` flags, and a CUDA graph is being captured. New flags would
            belong to that graph.
    """
    lane = call.lane
    sets = _flags.get(lane)
    if sets is None or sets[captured].count < count:
        _require_preparable(call, f"{call.op} needs {count} flags for its kernel, which are not allocated")
    if sets is None:
        with _flags_guard:  # two threads may make the lane's first call
            sets = _flags.get(lane)
            if sets is None:
                sets = _flags[lane] = _new_sets(call)
    return sets[captured]


def _new_sets(call: Call) -> tuple[Flags, Flags]:
    device = call.lane.device
    architecture, _ = call.backend.machine(device)
    if architecture == INTERPRETER:  # nothing is captured
        return (Flags(device),) * 2
    from .stream_flags import StreamFlags

    in_memory = call.backend.described(device).stream_waits
    made = StreamFlags(device, in_memory), StreamFlags(device, in_memory=False)
    made[0].prepare(made[0].count)  # another thread may make the first call with them, on another stream
    return made


def raise_kernel_failures() -> None:
    """Raise if a wait of a kernel on any lane of this process has passed its deadline, as far as the host knows by now.

    A lane raises only once.

    Raises:
        torch.distributed.DistBackendError: the error names the call, the chunk and the epochs.
    """
    with _flags_guard:
        known = [flags for sets in _flags.values() for flags in dict.fromkeys(sets)]
    for flags in known:
        if not flags.reported:
            _raise(flags, flags.failure())


def _raise(flags: Flags, expired: Expired | None) -> None:
    if expired is not None:
        flags.reported = True
        raise dist.DistBackendError(str(expired))


def _require_preparable(call: Call, what: str) -> None:
    try:
        call.lane.workspace.require_preparable(what)
    except NotPreparedError as error:
        raise call.not_prepared(error) from None


def _known(call: Call, name: str, total: int) -> tuple[Place, int, Caller, Machine, Callable[..., None]]:
    """Return what is the same for all calls of a route: (place, count of flags, caller, machine, launcher)."""
    chunks, world = call.choice.chunks, call.world
    machine = Machine(*call.backend.machine(call.lane.device))
    require_known(machine.architecture)  # checked here, because an error in a step would break the lane
    rows = bounds(total, world)[1]
    place = Place(call.rank, total, rows, bounds(rows, chunks)[1], chunks, world)
    caller = Caller(call.op, call.peers.state.name, call.lane.index, call.rank, world, chunks)
    return place, world * chunks, caller, machine, getattr(load(name, machine.architecture), name)


class FlagTurn:
    """The flags of a lane in calls of one kind, which have their turns on the lane one after another.

    Args:
        count: how many flags a call uses.
        seconds: how long a wait for a peer may last.
        captured: whether the flags are those of captured calls.
    """

    __slots__ = ("_caller", "_captured", "_count", "_lane", "flags", "seconds")

    def __init__(self, lane: Lane, flags: Flags, count: int, seconds: float, caller: Caller, captured: bool) -> None:
        self._lane, self.flags, self._count, self.seconds = lane, flags, count, seconds
        self._caller, self._captured = caller, captured

    def like(self, other: FlagTurn) -> bool:
        """True if calls with ``other`` use the same flags in the same way."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def run(self, issue: Callable[[tuple[Tensor, ...]], None]) -> _C.Flags | None:
        """Start a call with all flags cleared, and call ``issue`` with the memory that its kernel reads and writes.

        Return the flags that the last launch of the call has to end; None: there is no such launch.

        Raises DistBackendError if a wait of a kernel is known to have passed its deadline.
        """
        flags = self.flags
        _raise(flags, flags.failure())
        if not self._captured:
            _, captured = _flags[self._lane]
            captured.grow(self._count)  # a capture can allocate nothing, and this call may be its preparation
        flags.begin(self._count, _SLACK * self.seconds, self._caller)
        try:
            issue((flags.words, flags.status, flags.counters))
        except BaseException as error:
            flags.abandon(error)
            raise
        native: _C.Flags | None = flags.native
        if native is None:
            _raise(flags, flags.failure())
        return native


class FlaggedKernel:
    """The kernel of one call, and its flags.

    Args:
        name: the name of the kernel's module, and of its launcher in that module.
        total: the number of rows of all ranks' parts together.
        columns: columns of the product, if the kernel raises the flags of the rows that it has computed.

    Attributes:
        flags: one flag for each chunk of each rank. It is not set if the call only notes what it needs.
        captured: whether the call is being captured in a CUDA graph; not set either.
        turn: the flags in this call; not set either.
        place: which rows belong to which rank.
    """

    flags: Flags
    captured: bool
    turn: FlagTurn

    def __init__(self, call: Call, name: str, total: int, columns: int | None = None) -> None:
        self._call, self._columns = call, columns
        known = call.route.kernel
        if known is None or known[0].total != total:
            known = call.route.kernel = _known(call, name, total)
        self.place, self._count, self._caller, self._machine, self._launcher = known
        if call.settings.needs is None:
            self.captured, self._seconds = call.lane.workspace.capturing(), call.settings.seconds
            self.flags = flags_of(call, self._count, self.captured)
            self.turn = FlagTurn(call.lane, self.flags, self._count, self._seconds, self._caller, self.captured)

    def launch(self, operands: Operands) -> None:
        """Launch the kernel."""
        given, row_scale = operands
        self._launcher(*given, self.flags, self.place, self._machine, row_scale=row_scale)

    def described(
        self, given: Sequence[Tensor | None], others: Sequence[Tensor | None], options: Hashable
    ) -> tuple[Sequence[Tensor], Hashable]:
        """Return the operands of a run with this kernel, and its variant; see `Run`.

        A script contains a compiled kernel and its numbers. So the variant has all that they depend on.

        Args:
            given: the operands, and None for those that this call does not have.
            others: further tensors for whose dtypes and layouts the kernel is compiled, or None.
            options: what else the kernel is compiled for.
        """
        if self._call.settings.needs is not None or self.flags.native is None:
            return (), None
        operands = [each for each in given if each is not None]
        return operands, (_C.layout_key([*given, *others]), options, id(self.flags), self._seconds)

    def work(self, step: Step, operands: Operands) -> Sequence[Work] | None:
        """See `Run.work`."""
        native, place = self.flags.native, self.place
        if native is None:
            return None
        if step.chunk is not None:
            flag = self._flag(step)
            return [RaiseFlag(native, flag) if step.kind == "raise" else AwaitFlag(native, flag)]
        from ....kernels.launchable import Launchable, launchable

        launches: list[Launchable | None] = []
        note = lambda *given, **options: launches.append(launchable(*given, **options))  # noqa: E731
        self._ahead(note, self.flags, operands)
        count = programs(self._machine.multiprocessors)
        work = [Launch(*each, count) for each in launches if each is not None]
        if len(work) < len(launches):
            return None
        bare = [] if self._columns is None else chunks_without_tiles(place, self._columns)
        return [*(RaiseFlag(native, chunk) for chunk in bare), *work]

    def note(self, operands: Operands) -> None:
        """Note that a call with such operands will launch the kernel."""

        def load_kernels() -> None:
            self._ahead(load_ahead, flags_of(call, 0, call.lane.workspace.capturing()), stand_ins(operands))

        call = self._call
        call.settings.needs.kernel(call, self._count, load_kernels)

    def require_loaded(self, operands: Operands) -> None:
        """Raise NotPreparedError if a kernel of this call, which is being captured, is not loaded: CUDA would reject
        that it is loaded now.
        """
        try:
            with self._call.lane.lock:  # the lock also makes the lane's device the current one
                self._ahead(require_loaded, self.flags, operands)
        except NotLoadedError:
            _require_preparable(self._call, f"{self._call.op} needs a kernel that is not loaded")

    def _ahead(self, ahead: Callable[..., None], flags: Flags, operands: Operands) -> None:
        given, row_scale = operands
        self._launcher(*given, flags, self.place, self._machine, row_scale=row_scale, ahead=ahead)

    def up(self, step: Step) -> None:
        """Set the flag of a step's chunk."""
        self.flags.up(self._flag(step))

    def poll(self, step: Step) -> None:
        """Wait until the kernel has set the flag of a step's chunk."""
        flag, seconds = self._flag(step), self._seconds
        if not self.flags.wait(flag, seconds):
            owner, piece = divmod(flag, self.place.chunks)
            raise dist.DistBackendError(
                f"{self._call.op}: rank {self.place.rank} of {self.place.world}: its own kernel has not computed chunk "
                f"{piece} for rank {owner} in {seconds:g} s. If it is only slow, raise the limit with "
                "symm_overlap.timeout(seconds)."
            )

    def _flag(self, step: Step) -> int:
        """Return the flag of a step's chunk."""
        assert step.chunk is not None
        owner, piece = step.chunk
        flag: int = owner * self.place.chunks + piece
        return flag

    def watched(self, table: Table) -> Table:
        """Return ``table`` with every function wrapped, so that a step that fails also ends the waits of the kernel."""
        return {kind: partial(self._watch, function) for kind, function in table.items()}

    def _watch(self, function: Callable[[Step], object], step: Step) -> None:
        try:
            function(step)
        except BaseException as error:
            self.flags.abandon(error)
            raise
