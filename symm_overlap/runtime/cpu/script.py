"""A plan made ready to be issued on CPU without Python.

The steps of a small call take less time than Python needs to reach them. So they are handed over together, as far as
they are copies, signals, waits, and work that is told as data; any other step is called back. Where every view lies is
worked out once; what changes from call to call is the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...plan import Item, Life, Plan, Region, Step, Table, at_step, kind
from ..work import Copy, Multiply, Sum, Work, WorkOf

At = Callable[[Region], Tensor]


class CpuScript:
    """See `symm_overlap.runtime.backend.Script`.

    Args:
        lane: does the signals and waits.
        plan, at, tensors, operands, work: see `symm_overlap.runtime.backend.Workspace.script`.
        stays: whether a tensor lies at the same place in every call.
    """

    def __init__(
        self,
        lane: _C.CpuLane,
        plan: Plan,
        at: At,
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        stays: Callable[[Tensor], bool],
    ) -> None:
        self._lane, self._native = lane, _C.CpuScript()
        self._native_items: list[Item] = []  # of each native step, the plan's
        # Native steps from ... to ..., and the step that Python runs behind them.
        self._stretches: list[tuple[int, int, Item | None]] = []
        begin = 0
        for item in plan.program.items[1:-1]:  # between fork and join, which do nothing on one thread
            if self._add(plan, item.step, at, tensors) or self._add_work(
                work(item.step), [*tensors.values(), *operands], stays
            ):
                self._native_items += [item] * (len(self._native) - len(self._native_items))
            elif kind(item.kind).memory:  # a step that touches none, such as a sleep, has nothing to do on one thread
                self._stretches.append((begin, len(self._native), item))
                begin = len(self._native)
        self._stretches.append((begin, len(self._native), None))
        self.complete = all(item is None for *_, item in self._stretches)

    def run(self, op: str, tensors: Sequence[Tensor], table: Table) -> None:
        """See `symm_overlap.runtime.backend.Script.run`."""
        native, lane = self._native, self._lane
        for begin, end, item in self._stretches:
            if begin < end:
                try:
                    native.run(lane, tensors, begin, end)
                except BaseException as error:
                    failure = dist.DistBackendError(f"{op}: {error}") if type(error) is dist.DistBackendError else error
                    raise at_step(failure, self._native_items[native.at]) from None
            if item is not None:
                try:
                    table[item.kind](item.step)
                except BaseException as error:
                    raise at_step(error, item)  # noqa: B904 (the same exception)

    def _add(self, plan: Plan, step: Step, at: At, tensors: Mapping[str, Tensor]) -> bool:
        """Append a step that needs no Python; False for any other."""
        record = kind(step.kind)
        if record.meets == "posts":
            for peer in step.peers:
                self._native.signal(peer, step.channel)  # type: ignore[arg-type]
        elif record.meets == "awaits":
            for peer in step.peers:
                self._native.wait(peer, step.channel)  # type: ignore[arg-type]
        elif record.role == "copy":
            target, source = step.writes[0], step.reads[0]
            if not (_has_a_place(plan, target, tensors) and _has_a_place(plan, source, tensors)):
                return False
            rows = _rows(at(target), at(source))
            if rows is None:
                return False
            self._native.copy(_place(plan, target, at, tensors), _place(plan, source, at, tensors), rows)
        else:
            return False
        return True

    def _add_work(
        self, work: Sequence[Work] | None, tensors: Sequence[Tensor], stays: Callable[[Tensor], bool]
    ) -> bool:
        """Append what a step computes; False if Python has to."""
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        if work is None or len(indices) < len(tensors):  # a tensor that is two of them in this call may not be later
            return False
        named = {id(tensor): indices.get(id(tensor), tensor) for each in work for tensor in _tensors_of(each)}
        if not all(isinstance(found, int) or stays(found) for found in named.values()):
            return False
        for each in work:
            if isinstance(each, Multiply):
                self._native.multiply(named[id(each.a)], named[id(each.b)], named[id(each.out)], each.add)
            elif isinstance(each, Copy):
                self._native.copy_tensor(named[id(each.out)], named[id(each.source)])
            else:
                partials = [named[id(partial)] for partial in each.partials]
                self._native.sum(partials, named[id(each.out)], each.average)
        return True


def _tensors_of(work: Work) -> list[Tensor]:
    return [*work.partials, work.out] if isinstance(work, Sum) else [part for part in work if isinstance(part, Tensor)]


def _has_a_place(plan: Plan, region: Region, tensors: Mapping[str, Tensor]) -> bool:
    """Whether it is known before the call where a region lies."""
    return plan.buffers[region.buffer] is Life.CALL or (region.rank == plan.rank and region.buffer in tensors)


def _place(plan: Plan, region: Region, at: At, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    view = at(region)
    if plan.buffers[region.buffer] is Life.CALL:
        return -1, view.data_ptr()
    return list(tensors).index(region.buffer), view.data_ptr() - tensors[region.buffer].data_ptr()


def _rows(to: Tensor, source: Tensor) -> tuple[int, int, int, int] | None:
    """Rows to copy, bytes of a row, and bytes from one row to the next at either side; None for another lay-out, or
    where only a part of a place is copied to.
    """
    if to.numel() != source.numel():
        return None
    if to.is_contiguous() and source.is_contiguous():
        return 1, to.nbytes, 0, 0
    if to.dim() != 2 or not all(view.shape[1] == 1 or view.stride(1) == 1 for view in (to, source)):
        return None
    size = to.element_size()
    return to.shape[0], to.shape[1] * size, to.stride(0) * size, source.stride(0) * size
