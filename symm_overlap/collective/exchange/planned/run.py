"""One run of a plan: where its buffers lie, and what runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ....plan import Layout, Plan, Region, Step, Table, execute, layout
from ....runtime import NotPreparedError, Part, Work, meets_in_kernels
from ..call import Call


class Run:
    """One call's run of its plan.

    Args:
        outputs: what the call writes.
        tensors: by buffer, the contiguous tensors of this rank that copies touch, besides the workspace.
        operands: further tensors of the caller's that steps compute with, always in the same order.
        variant: what else the work of the steps depends on, besides the problem of the call.
        unit_bytes: for each buffer in the workspace, the bytes of its largest unit.
    """

    scriptable = True  # whether steps may be issued without Python; those that touch no memory then do nothing here

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
        """Make the call, or only note what it needs."""
        call = self.call
        if call.settings.needs is not None:
            self.note()
            return
        try:
            call.lane.run(
                call.op,
                self._issue,
                self.outputs,
                nbytes=self.layout.nbytes,
                channels=self.plan.channels,
                seconds=call.settings.seconds,
                call_hash=call.peers.hash_of(call.route.digest),
                by_kernels=meets_in_kernels(self.plan),
            )
        except NotPreparedError as error:
            raise NotPreparedError(f"{error} {call.problem}") from None

    def note(self) -> None:
        """Note what the call needs."""
        self.call.settings.needs.workspace(self.call, self.layout.nbytes, self.plan.channels)

    def view(self, region: Region) -> Tensor:
        """The tensor at a region. For one in the workspace, `at` is quicker."""
        raise NotImplementedError

    def at(self, region: Region) -> Tensor:
        """The tensor at a region, as `view` made it in an earlier call where it lies in the workspace."""
        kept = self._kept.get(region)
        return self.view(region) if kept is None else kept

    def operand(self, region: Region) -> Tensor | Part:
        """The tensor at a region, as work that is told as data names it."""
        view, tensor = self.at(region), self.tensors.get(region.buffer)
        return view if tensor is None or view is tensor else Part(tensor, view)

    def steps(self) -> Table:
        """What runs the steps that compute."""
        raise NotImplementedError

    def work(self, step: Step) -> Sequence[Work] | None:
        """What a step computes, if it can be told as data; None where only its function in `steps` knows."""
        return None

    def watched(self, table: Table) -> Table:
        """The functions that run the steps, with whatever has to be around each of them."""
        return table

    def shared(self, region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a region of a buffer in the workspace."""
        place = self.layout
        offset = place.offset[region.buffer] + region.start * place.stride[region.buffer]
        view = self._kept[region] = self.workspace.view(region.rank, self.parity, offset, shape, dtype)
        return view

    def _issue(self, parity: int) -> None:
        """Run every step, in this half of the workspace."""
        call = self.call
        self.parity, transforms = parity, call.settings.transforms
        given = (*self.tensors.values(), *self.operands)
        kept = call.lane.kept(call.problem, self.layout, parity, self.variant, _same(given))
        self._kept = kept.views
        if not transforms and self.scriptable:
            if not kept.scripted:
                kept.script = self.workspace.script(
                    self.plan, self.at, self.tensors, self.operands, self.work, call.lane.streams
                )
                kept.scripted = True
            if (script := kept.script) is not None:
                table: Table = {} if script.complete else self._table()
                script.run(call.op, given, table)
                return
        table = self._table()
        table = {**table, **self.workspace.steps()}
        for transform in transforms:
            table = transform(self.plan, table)
        execute(self.plan, self.watched(table), call.lane.streams)

    def _table(self) -> Table:
        return {"publish": self._copy, "pull": self._copy, **self.steps()}

    def _copy(self, step: Step) -> None:
        self.call.backend.copy(self.at(step.writes[0]), self.at(step.reads[0]))


def _same(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Which tensors are one and the same: of each, the first place where it is; () where all differ."""
    if len(set(map(id, tensors))) == len(tensors):
        return ()
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))


def scratch(plan: Plan, buffer: str, make: Callable[[], Tensor]) -> Tensor | None:
    """Memory for a buffer of this rank alone, if the plan has it. It is made before the plan runs, on the caller's
    stream, because steps on several streams use it.
    """
    return make() if buffer in plan.buffers else None
