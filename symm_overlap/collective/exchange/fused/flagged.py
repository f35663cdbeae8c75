"""The part that all runs of fused plans share: the flags of a lane, and the handling of a kernel when a call fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ....kernels import load
from ....kernels._triton import NotLoadedError, load_ahead, require_loaded
from ....kernels.configuration import INTERPRETER, require_known
from ....kernels.flags import Caller, Expired, Flags
from ....kernels.place import Machine, Place
from ....plan import Step, Table
from ....runtime import Lane, NotPreparedError
from ..bounds import bounds
from ..call import Call
from .stand_in import stand_ins

_flags: WeakKeyDictionary[Lane, Flags] = WeakKeyDictionary()
"""One set of flags for each lane, because calls on one lane run one after another."""

_flags_guard = threading.Lock()

Operands = tuple[tuple[Any, ...], Tensor | None]
"""(arguments of a kernel's launcher before its flags, scales of the rows or None)."""

_SLACK = 2.0
"""A kernel waits longer than the copies by this factor, so that the copies, whose errors say more, fail first."""


def flags_of(call: Call, count: int = 0) -> Flags:
    """Return the flags of a call's lane. They are allocated for the lane's first call that needs flags.

    Raises:
        NotPreparedError: there are fewer than ``count`` flags, and a CUDA graph is being captured. New flags would
            belong to that graph.
    """
    lane = call.lane
    found = _flags.get(lane)
    if found is None or found.count < count:
        _require_preparable(call, f"{call.op} needs {count} flags for its kernel, which are not allocated")
    if found is None:
        architecture, _ = call.backend.machine(lane.device)
        interpreted = architecture == INTERPRETER
        kind = Flags if interpreted else load("stream_flags", architecture).StreamFlags
        found = kind(lane.device)
        with _flags_guard:
            _flags[lane] = found
    return found


def raise_kernel_failures() -> None:
    """Raise if a wait of a kernel on any lane of this process has passed its deadline, as far as the host knows by now.

    A lane raises only once.

    Raises:
        torch.distributed.DistBackendError: the error names the call, the chunk and the epochs.
    """
    with _flags_guard:
        known = list(_flags.values())
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
        raise NotPreparedError(f"{error} {call.problem}") from None


class FlaggedKernel:
    """The kernel of one call, and its flags.

    Args:
        name: the name of the kernel's module, and of its launcher in that module.
        total: the number of rows of all ranks' parts together.

    Attributes:
        flags: one flag for each chunk of each rank. It is not set if the call only notes what it needs.
        place: which rows belong to which rank.
    """

    flags: Flags

    def __init__(self, call: Call, name: str, total: int) -> None:
        self._call, chunks = call, call.choice.chunks
        self._machine = Machine(*call.backend.machine(call.lane.device))
        require_known(self._machine.architecture)  # checked here, because an error in a step would break the lane
        self._launcher = getattr(load(name, self._machine.architecture), name)
        if call.settings.needs is None:
            self.flags = flags_of(call, call.world * chunks)
        rows = bounds(total, call.world)[1]
        self.place = Place(call.rank, total, rows, bounds(rows, chunks)[1], chunks, call.world)

    def launch(self, operands: Operands) -> None:
        """Launch the kernel."""
        given, row_scale = operands
        self._launcher(*given, self.flags, self.place, self._machine, row_scale=row_scale)

    def note(self, operands: Operands, outputs: Sequence[Tensor]) -> None:
        """Note that a call with such ``outputs`` will launch the kernel."""

        def load_kernels() -> None:
            self._ahead(load_ahead, flags_of(call), *stand_ins((operands, outputs)))

        call = self._call
        call.settings.needs.kernel(call, call.world * self.place.chunks, load_kernels)

    def require_loaded(self, operands: Operands, outputs: Sequence[Tensor]) -> None:
        """Raise NotPreparedError if the call would have to load a kernel while a CUDA graph is being captured.

        CUDA rejects that.
        """
        try:
            _require_preparable(self._call, f"{self._call.op} needs a kernel that is not loaded")
        except NotPreparedError as error:
            try:
                with self._call.lane.lock:  # the lock also makes the lane's device the current one
                    self._ahead(require_loaded, self.flags, operands, outputs)
            except NotLoadedError:
                raise error from None

    def _ahead(self, ahead: Callable[..., None], flags: Flags, operands: Operands, outputs: Sequence[Tensor]) -> None:
        given, row_scale = operands
        flags.kernels(outputs, ahead)
        self._launcher(*given, flags, self.place, self._machine, row_scale=row_scale, ahead=ahead)

    def begin(self) -> None:
        """Start the call, in its turn on the lane, with all flags cleared.

        Raises DistBackendError if a wait of a kernel of an earlier call has passed its deadline.
        """
        call, place = self._call, self.place
        _raise(self.flags, self.flags.failure())
        caller = Caller(call.op, call.peers.state.name, call.lane.index, place.rank, place.world, place.chunks)
        self.flags.begin(place.world * place.chunks, _SLACK * call.settings.seconds, caller)

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """End the call. Raises DistBackendError if a wait of the kernel is known to have passed its deadline."""
        _raise(self.flags, self.flags.finish(outputs))

    def up(self, step: Step) -> None:
        """Set the flag of a step's chunk."""
        assert step.chunk is not None
        owner, piece = step.chunk
        self.flags.up(owner * self.place.chunks + piece)

    def poll(self, step: Step) -> None:
        """Wait until the kernel has set the flag of a step's chunk."""
        assert step.chunk is not None
        (owner, piece), seconds = step.chunk, self._call.settings.seconds
        if not self.flags.wait(owner * self.place.chunks + piece, seconds):
            raise dist.DistBackendError(
                f"{self._call.op}: rank {self.place.rank} of {self.place.world}: its own kernel has not computed chunk "
                f"{piece} for rank {owner} in {seconds:g} s. If it is only slow, raise the limit with "
                "symm_overlap.timeout(seconds)."
            )

    def watched(self, table: Table) -> Table:
        """Return ``table`` with every function wrapped, so that a step that fails also ends the waits of the kernel."""
        return {kind: partial(self._watch, function) for kind, function in table.items()}

    def _watch(self, function: Callable[[Step], object], step: Step) -> None:
        try:
            function(step)
        except BaseException as error:
            self.flags.abandon(error)
            raise
