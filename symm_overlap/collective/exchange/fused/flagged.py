"""What the runs of fused plans share: the flags of a lane, and what becomes of a kernel when a call fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ....kernels import load
from ....kernels.configuration import INTERPRETER, require_known
from ....kernels.flags import Expired, Flags
from ....kernels.place import Machine, Place
from ....plan import Step, Table
from ....runtime import Lane
from ..bounds import bounds
from ..call import Call

_flags: WeakKeyDictionary[Lane, Flags] = WeakKeyDictionary()
"""By lane: calls on one lane follow one another."""

_SLACK = 2.0
"""A kernel waits so many times as long as the copies do, which know better what they wait for and fail first."""


class FlaggedKernel:
    """The kernel of one call, and its flags.

    Args:
        name: of the kernel's module.
        total: rows of all ranks' parts together.

    Attributes:
        module: with the kernel.
        flags: one for each chunk of each rank.
        place, machine: what the kernel's launcher asks for.
    """

    def __init__(self, call: Call, name: str, total: int) -> None:
        self._call, chunks = call, call.choice.chunks
        self.machine = Machine(*call.backend.machine(call.lane.device))
        require_known(self.machine.architecture)  # here: an error in a step would break the lane
        self.module = load(name, self.machine.architecture)
        if (found := _flags.get(call.lane)) is None:
            found = _flags[call.lane] = self._new_flags()
        self.flags = found
        found.require_usable(call.world * chunks)
        rows = bounds(total, call.world)[1]
        self.place = Place(call.rank, total, rows, bounds(rows, chunks)[1], chunks, call.world)

    def _new_flags(self) -> Flags:
        device, architecture = self._call.lane.device, self.machine.architecture
        if architecture == INTERPRETER:
            return Flags(device)
        flags: Flags = load("stream_flags", architecture).StreamFlags(device)
        return flags

    def begin(self) -> None:
        """Start the call, in its turn on the lane: all flags are down. Raises what the host did not know before."""
        flags = self.place.world * self.place.chunks
        self._require_seen(self.flags.begin(flags, _SLACK * self._call.settings.seconds), " in an earlier call")

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """End the call. Raises DistBackendError where the kernel has given up a wait by itself."""
        self._require_seen(self.flags.finish(outputs))

    def up(self, step: Step) -> None:
        """Raise the flag of a step's chunk."""
        assert step.chunk is not None
        owner, piece = step.chunk
        self.flags.up(owner * self.place.chunks + piece)

    def poll(self, step: Step) -> None:
        """Wait until the kernel has raised the flag of a step's chunk."""
        assert step.chunk is not None
        (owner, piece), seconds = step.chunk, self._call.settings.seconds
        if not self.flags.wait(owner * self.place.chunks + piece, seconds):
            raise dist.DistBackendError(
                f"{self._call.op}: rank {self.place.rank} of {self.place.world}: its own kernel has not made chunk "
                f"{piece} for rank {owner} in {seconds:g} s. If it is only slow, raise the limit with "
                "symm_overlap.timeout(seconds)."
            )

    def watched(self, table: Table) -> Table:
        """Any step that fails ends the waits of the kernel, which would wait for what does not come."""
        return {kind: partial(self._watch, function) for kind, function in table.items()}

    def _watch(self, function: Callable[[Step], object], step: Step) -> None:
        try:
            function(step)
        except BaseException as error:
            self.flags.abandon(error)
            raise

    def _require_seen(self, expired: Expired | None, when: str = "") -> None:
        if expired is not None:
            rank, piece = divmod(expired.chunk, self.place.chunks)
            raise dist.DistBackendError(
                f"{self._call.op}: rank {self.place.rank} of {self.place.world}: the kernel has waited{when} "
                f"{self.flags.seconds:g} s for chunk {piece} of rank {rank}: expected epoch {expired.expected}, found "
                f"{expired.found}"
            )
