"""A workspace without a device: programs are issued to a driver that only records what it was asked to do.

It compiles and issues exactly the programs that a GPU would get, and describes in words what was launched: on which
stream, in which order, and which events order the work. The memory of all ranks is ordinary memory of this process, and
nothing is written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from .. import _C
from ..plan import Plan, Region, Step, Streams
from .script import Script
from .symmetric import half_size, place_in_half
from .work import WorkOf


class StandInWorkspace:
    """See `symm_overlap.runtime.backend.Workspace`.

    Args:
        world: the number of ranks.

    Attributes:
        driver: records what it was asked to do.
        streams: the numbers of the streams that plans have named; the caller's stream comes first.
    """

    def __init__(self, world: int) -> None:
        self.half = self.channels = 0
        self.driver = _C.LogDriver()
        self.streams: dict[str, int] = {}
        self._memory = torch.empty(world, 0, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] = {}  # of the latest call

    def guarded(self, lock: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Return ``lock``: nothing else is needed."""
        return lock

    def capturing(self) -> bool:
        """Return False: nothing is captured."""
        return False

    def require_preparable(self, what: str) -> None:
        """Never raises: this workspace can always grow."""

    def require_capturable(self, what: str) -> None:
        """Never raises: nothing is captured."""

    def grow(self, nbytes: int, channels: int) -> None:
        """See `Workspace.grow`."""
        self.half, self.channels = half_size(nbytes), channels
        self._memory = torch.empty(self._memory.shape[0], 2 * self.half, dtype=torch.uint8)

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.view`."""
        return self.place(rank, place_in_half(self.half, parity, offset, shape, dtype), shape, dtype)

    def place(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Workspace.place`."""
        # With a storage of its own, as in other workspaces: its owner sees when the last tensor at a place is gone.
        memory = self._memory[rank, offset : offset + prod(shape) * dtype.itemsize]
        if memory.numel() == 0:
            return memory.view(dtype).view(*shape)
        return torch.frombuffer(memory.numpy(), dtype=dtype).view(*shape)

    def memory(self) -> object:
        """See `Workspace.memory`."""
        return self._memory

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """Do nothing: there are no peers."""

    def take_half(self, number: int) -> int:
        """See `Workspace.take_half`."""
        return number % 2

    def steps(self) -> dict[str, Callable[[Step], object]]:
        """Return no functions: with a step transform, only the steps that compute are run."""
        return {}

    def script(
        self,
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        streams: Streams,
    ) -> Script:
        """See `Workspace.script`."""
        for name in plan.streams:
            self.streams.setdefault(name, len(self.streams))
        names = [*tensors, *(f"operand{index}" for index in range(len(operands)))]
        return _NotedScript(self, names, plan, at, tensors, operands, work)

    def new_program(self) -> _C.Program:
        """Return an empty program. A benchmark may override this to issue copies in another way."""
        return _C.Program()

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is stored in the workspace of some rank."""
        begin = self._memory.data_ptr()
        return begin <= tensor.data_ptr() < begin + self._memory.nbytes

    def called_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember the names of the tensors of a call."""
        self._tensors = dict(tensors)

    def end(self, outputs: Sequence[Tensor], flags: _C.Flags | None) -> int:
        """See `Workspace.end`."""
        self.driver.poison(outputs)
        return 1

    def give_up(self, op: str) -> None:
        """Do nothing: there are no peers."""

    def why_gone(self, peer: int) -> str:
        """Return an empty string: there are no peers that could be gone."""
        return ""

    def launched(self) -> list[tuple[str, str, str]]:
        """Return what was issued since the last call of this method, as (stream, what, the rest in words).

        Addresses are written as bytes from the start of the half of a rank's workspace, or of a tensor of the latest
        call.
        """
        names = list(self.streams) or ["caller"]  # before any script
        return [(names[stream], what, self._described(what, numbers)) for what, stream, numbers in self.driver.take()]

    def _described(self, what: str, numbers: Sequence[int]) -> str:
        at = self._named
        match what, list(numbers):
            case "signal" | "wait", [channel, *peers]:
                return f"{' '.join(map(str, peers))} channel {channel}"
            case "barrier", [channel, *_]:
                return f"channel {channel}"
            case "pace", [duration, *_]:
                return f"{duration} ns"
            case "record" | "follow", [event, *_]:
                return f"event {event}"
            case "raise" | "await", [flag, *_]:
                return f"flag {flag}"
            case "kernel", [programs, threads, *addresses]:
                return f"{programs} programs of {threads} threads: {' '.join(map(at, addresses))}"
            case "copy", [to, source, 1, nbytes, *_]:
                return f"{at(to)} <- {at(source)} {nbytes} bytes"
            case "copy", [to, source, rows, nbytes, to_stride, source_stride]:
                return f"{at(to)} <- {at(source)} {rows} rows of {nbytes} bytes every {to_stride}, {source_stride}"
            case "copy tensor", [to, source, nbytes, *_]:
                return f"{at(to)} <- {at(source)} {nbytes} bytes"
            case "make", [elements, *_]:
                return f"{elements} elements"
            case "add", [to, source, elements, *_]:
                return f"{at(to)} += {at(source)} of {elements}"
            case "multiply" | "multiply scaled", [out, a, b, rows, columns, inner, add, bias]:
                product = f"{at(a)} @ {at(b)}" + (f" + {at(bias)}" if bias else "")
                return f"{at(out)} {'+=' if add else '='} {product} ({rows}, {inner}) ({inner}, {columns})"
            case "sum", [out, copy, elements, average, *partials]:
                outs = at(out) + (f", {at(copy)}" if copy else "")
                return f"{outs} = {'mean' if average else 'sum'} of {elements}: {' '.join(map(at, partials))}"
            case "meet and sum", [channel, done_channel, *rest]:
                behind = "" if done_channel < 0 else f", done on channel {done_channel}"
                return f"channel {channel}{behind}: {self._described('sum', rest)}"
            case "await and gather", [channel, out, part, nbytes, *sources]:
                places = " ".join(at(source) if source else "-" for source in sources)
                return f"channel {channel}: {at(out)} {nbytes} bytes <- parts of {part}: {places}"
        return " ".join(map(at, numbers))

    def _named(self, address: int) -> str:
        offset = address - self._memory.data_ptr()
        if 0 <= offset < self._memory.nbytes:
            rank, byte = divmod(offset, 2 * self.half)
            return f"workspace@{rank}+{byte % self.half}"
        for name, tensor in self._tensors.items():
            if 0 <= address - tensor.data_ptr() < max(1, tensor.untyped_storage().nbytes()):
                return f"{name}+{address - tensor.data_ptr()}"
        return "elsewhere"


class _NotedScript(Script):
    """A script of the stand-in. It tells the workspace the names of the tensors of every call."""

    def __init__(
        self,
        workspace: StandInWorkspace,
        names: Sequence[str],
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
    ) -> None:
        self._workspace, self._names = workspace, names
        numbers, program = dict(workspace.streams), workspace.new_program()
        super().__init__(workspace.driver, plan, at, tensors, operands, work, workspace.holds, numbers, program)

    def run(self, op: str, tensors: Sequence[Tensor], table: Mapping[str, Callable[[Step], object]]) -> None:
        """See `Script.run`."""
        self._workspace.called_with(dict(zip(self._names, tensors, strict=True)))
        super().run(op, tensors, table)
