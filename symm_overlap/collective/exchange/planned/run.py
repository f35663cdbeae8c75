"""One run of a plan: the tensors of its buffers, and the functions that run its steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .... import _C
from ....plan import Layout, Plan, Region, Step, Table, execute, layout
from ....runtime import NotPreparedError, Part, Script, Work, call_hash, meets_in_kernels, ranged
from ..call import Call
from ..recorded import record_run


class Turn(Protocol):
    """What a lane has for calls of one kind, and what begins and ends with each of them.

    Attributes:
        seconds: how long a wait may last; the script of a call contains this number.
    """

    seconds: float

    def run(self, issue: Callable[[tuple[Tensor, ...]], None]) -> _C.Flags | None:
        """Call ``issue(memory)`` with the lane's memory for such calls. Return the flags that the call has used."""

    def like(self, other: Any) -> bool:
        """True if calls with another turn can be carried out in the same way."""


class Run:
    """One call's run of its plan.

    Args:
        outputs: the tensors that the call writes.
        tensors: by buffer, the contiguous tensors of this rank that copies touch, besides the workspace.
        operands: further tensors of the caller that steps compute with, always in the same order.
        variant: a key for whatever the work of the steps depends on besides the problem of the call.
        unit_bytes: for each buffer in the workspace, the size of its largest unit in bytes.

    Attributes:
        turn: what surrounds the issuing of the plan, if anything does.
        script: the script that has carried out the run; None if it was carried out in another way, or not yet.
        parity: the half of the workspace that the run has used.
        given: the tensors that the script was called with, besides those that ``turn`` adds.
        generation: how often the workspace had grown by then.
        ran: whether the run was carried out, and not only captured or noted.
    """

    turn: Turn | None = None
    script: Script | None = None
    given: Sequence[Tensor] = ()
    generation = 0
    ran = False

    def __init__(
        self,
        call: Call,
        plan: Plan,
        outputs: Sequence[Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor] = (),
        variant: Hashable = None,
        **unit_bytes: int,
    ) -> None:
        self.call, self.plan, self.outputs, self.tensors, self.operands = call, plan, outputs, tensors, operands
        self.variant = variant
        layouts = call.route.layouts
        found = layouts.get(id(plan))
        if found is None:
            found = layouts[id(plan)] = plan, layout(plan, unit_bytes)
        self.layout: Layout = found[1]
        self.workspace = call.lane.workspace
        self.parity = 0
        self._kept: dict[Region, Tensor] = {}

    def run(self) -> None:
        """Carry out the call, or, inside `symm_overlap.prepare`, only note what it needs."""
        call = self.call
        if call.settings.needs is not None:
            self.note()
            return
        try:
            ran = call.lane.run(
                call.op,
                self._issue,
                self.outputs,
                nbytes=self.layout.nbytes,
                channels=self.plan.channels,
                seconds=call.settings.seconds,
                call_hash=call_hash(call.route.digest, call.peers.number),
                by_kernels=meets_in_kernels(self.plan),
            )
        except NotPreparedError as error:
            raise call.not_prepared(error) from None
        self.ran = bool(ran)
        record_run(self)
        if not ran:
            call.peers.forget()

    def note(self) -> None:
        """Note the workspace and channels that the call needs."""
        self.call.settings.needs.workspace(self.call, self.layout.nbytes, self.plan.channels)

    def view(self, region: Region) -> Tensor:
        """Return the tensor at a region. For a region in the workspace, `at` is quicker."""
        raise NotImplementedError

    def at(self, region: Region) -> Tensor:
        """Return the tensor at a region. A view of the workspace is reused from an earlier call if there is one."""
        kept = self._kept.get(region)
        return self.view(region) if kept is None else kept

    def operand(self, region: Region) -> Tensor | Part:
        """Return the tensor at a region in the form in which `Work` names it."""
        view, tensor = self.at(region), self.tensors.get(region.buffer)
        return view if tensor is None or view is tensor else Part(tensor, view)

    def steps(self) -> Table:
        """Return the functions that run the steps that compute."""
        raise NotImplementedError

    def work(self, step: Step) -> Sequence[Work] | None:
        """Return the work of a step as data, or None if only its function in `steps` can carry it out."""
        return None

    @property
    def scriptable(self) -> bool:
        """Whether steps may be issued without Python."""
        return True

    def watched(self, table: Table) -> Table:
        """Return the functions that run the steps, wrapped if a subclass needs that."""
        return table

    def shared(self, region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at a region of a buffer in the workspace."""
        place = self.layout
        offset = place.offset[region.buffer] + region.start * place.stride[region.buffer]
        view = self._kept[region] = self.workspace.view(region.rank, self.parity, offset, shape, dtype)
        return view

    def _issue(self, parity: int) -> _C.Flags | None:
        """Run every step, in half ``parity`` of the workspace. Return the flags that the call has used, if any."""
        call = self.call
        self.parity, transforms = parity, call.settings.transforms
        given = (*self.tensors.values(), *self.operands)
        kept = call.lane.kept(call.problem, self.layout, parity, self.variant, _same(given))
        self._kept = kept.views
        if not transforms and self.scriptable:
            script = kept.script_by(
                lambda: self.workspace.script(
                    self.plan, self.at, self.tensors, self.operands, self.work, call.lane.streams
                )
            )
            if script is not None:
                table: Table = {} if script.complete else ranged(self._table())
                script.run(call.op, given, table)
                self.script, self.given, self.generation = script, given, call.lane.generation
                return None
        table = ranged({**self._table(), **self.workspace.steps()})
        for transform in transforms:
            table = transform(self.plan, table)
        execute(self.plan, self.watched(table), call.lane.streams)
        return None

    def _table(self) -> Table:
        return {"publish": self._copy, "pull": self._copy, **self.steps()}

    def _copy(self, step: Step) -> None:
        self.call.backend.copy(self.at(step.writes[0]), self.at(step.reads[0]))


def _same(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the index at which the same tensor occurs first; () if all tensors are different."""
    if len(set(map(id, tensors))) == len(tensors):
        return ()
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))


def scratch(plan: Plan, buffer: str, make: Callable[[], Tensor]) -> Tensor | None:
    """Allocate memory for a buffer that only this rank uses, if the plan has that buffer.

    It is allocated before the plan runs, on the caller's stream, because steps on several streams use it.
    """
    return make() if buffer in plan.buffers else None
