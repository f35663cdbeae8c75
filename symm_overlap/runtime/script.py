"""A plan compiled so that it is issued without Python.

Python takes longer to reach a step than most steps take to be issued. So a plan is compiled once to a flat program
(csrc/issue/program.h). The program contains signals, waits, copies, events, and the computations that are described as
data (`symm_overlap.runtime.work`). Python is called only for the other steps, between two stretches of the program. The
addresses of all views are computed once. Only the caller's tensors change from call to call.

A driver (csrc/issue/driver.h) carries out the program: the driver of a kind of device, or one that only records what it
was asked to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..plan import Item, Life, Plan, Region, Step, Table, at_step, kind
from ..plan.ranges import range_of
from .merged import AwaitAndGather, MeetAndSum, launches
from .work import Fixed, Operand, Part, Slice, Work, WorkOf, tensor_of

At = Callable[[Region], Tensor]

_IN_WORKSPACE = (Life.CALL, Life.PERSISTENT)


class Script:
    """One compiled plan. It serves calls whose tensors have the same sizes, in the same half of the workspace. If two
    of its tensors are the same object, they must be the same object in every call.

    Args:
        driver: carries out the program.
        plan, at, tensors, operands, work: see `symm_overlap.runtime.backend.Workspace.script`.
        stays: returns whether a tensor has the same address in every call.
        streams: the driver's number of each of the plan's streams; the caller's stream is 0.
        program: an empty program to fill; by default one that issues every copy unchanged.

    Attributes:
        complete: whether no step needs Python.
    """

    def __init__(
        self,
        driver: _C.Driver,
        plan: Plan,
        at: At,
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        stays: Callable[[Tensor], bool],
        streams: Mapping[str, int],
        program: _C.Program | None = None,
    ) -> None:
        self._driver, self._program = driver, _C.Program() if program is None else program
        self._program_items: list[Item] = []  # for each item of the program, the item of the plan
        # Each is (begin, end, step): items of the program, and the step that Python runs after them.
        self._stretches: list[tuple[int, int, Item | None]] = []
        compiler = _Compiler(self._program, plan, at, tensors, operands, stays)
        begin = 0
        for items, launch in launches(plan, at, tensors, work, driver.has_fused_meetings):
            # If several steps are one launch, an error names the step that computes or copies.
            named = items[2] if isinstance(launch, MeetAndSum) else items[-1]
            item, stream = items[-1], streams[items[0].step.stream]
            for event in items[0].waits:
                self._program.follow(stream, event)
            first = len(self._program)
            native = compiler.add(stream, item.step, work) if launch is None else compiler.add_launch(stream, launch)
            if native:
                self._program.name(first, range_of(named.step))
            else:
                self._program.enter(stream)
            self._note(named)
            if not native:
                self._stretches.append((begin, len(self._program), item))
                begin = len(self._program)
            if item.event is not None:
                self._program.record(stream, item.event)
                self._note(item)
        self._stretches.append((begin, len(self._program), None))
        self.complete = len(self._stretches) == 1
        self._used = compiler.used

    def _note(self, item: Item) -> None:
        self._program_items += [item] * (len(self._program) - len(self._program_items))

    def run(self, op: str, tensors: Sequence[Tensor], table: Table) -> None:
        """Run every step.

        Args:
            op: name of the op, for messages.
            tensors: the tensors of this call, in the order of `Workspace.script`, and then the operands.
            table: the functions that run the steps that need Python; see `symm_overlap.plan.execute`.

        Raises:
            Whatever a step raises, with the step's text added. Work enqueued so far is joined to the caller's stream.
        """
        try:
            self._run(op, tensors, table)
        except BaseException:
            self._driver.abandon()
            raise

    def _run(self, op: str, tensors: Sequence[Tensor], table: Table) -> None:
        program, driver = self._program, self._driver
        for begin, end, item in self._stretches:
            try:
                program.run(driver, tensors, begin, end)
            except BaseException as error:
                failure = dist.DistBackendError(f"{op}: {error}") if type(error) is dist.DistBackendError else error
                raise at_step(failure, self._program_items[program.at]) from None
            if item is not None and (function := table.get(item.kind)) is not None:
                try:
                    function(item.step)
                except BaseException as error:
                    raise at_step(error, item)  # noqa: B904 (the same exception)


class _Compiler:
    """Appends the steps of a plan to a program; see `Script` for the arguments."""

    def __init__(
        self,
        program: _C.Program,
        plan: Plan,
        at: At,
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        stays: Callable[[Tensor], bool],
    ) -> None:
        self._program, self._plan, self._at, self._tensors, self._stays = program, plan, at, tensors, stays
        self._places = {name: index for index, name in enumerate(tensors)}
        given = [*tensors.values(), *operands]
        self._given = len(given)
        # If one tensor has two places here, it has both in every call with this script. Its first place names it.
        self._indices = {id(tensor): index for index, tensor in reversed([*enumerate(given)])}
        # Memory that the current step allocates, and its index. Cleared for each step: another tensor may get the same
        # id.
        self._made: dict[int, int] = {}
        self.used: list[object] = []

    def add(self, stream: int, step: Step, work: WorkOf) -> bool:
        """Append a step. Return False if Python has to run it."""
        record = kind(step.kind)
        if record.meets == "posts":
            self._program.signal(stream, step.peers, step.channel)  # type: ignore[arg-type]
        elif record.meets == "awaits":
            self._program.wait(stream, step.peers, step.channel)  # type: ignore[arg-type]
        elif record.meets:
            self._program.barrier(stream, step.channel)  # type: ignore[arg-type]
        elif step.kind == "sleep":
            self._program.sleep(stream)
        elif step.kind not in ("fork", "join"):  # they only order other steps, by their events
            return self._add_copy(stream, step) or self._add_work(stream, work(step))
        return True

    def add_launch(self, stream: int, launch: MeetAndSum | AwaitAndGather) -> bool:
        """Append several steps as one launch."""
        self._made = {}
        if isinstance(launch, MeetAndSum):
            partials, out = [self.operand(each) for each in launch.sum.partials], self.operand(launch.sum.out)
            total = partials, launch.sum.average, out, self.optional(launch.sum.copy)
            self._program.meet_and_sum(stream, launch.channel, *total, launch.done_channel, launch.received)
        else:
            places = launch.sources, launch.part_bytes, self.operand(launch.out)
            self._program.await_and_gather(stream, launch.channel, *places, launch.received)
        return True

    def _add_copy(self, stream: int, step: Step) -> bool:
        if kind(step.kind).role != "copy" or not (
            self._has_a_place(step.writes[0]) and self._has_a_place(step.reads[0])
        ):
            return False
        rows = _rows(self._at(step.writes[0]), self._at(step.reads[0]))
        if rows is not None:
            self._program.copy(stream, self._place(step.writes[0]), self._place(step.reads[0]), rows)
        return rows is not None

    def _has_a_place(self, region: Region) -> bool:
        """True if the address of a region is known before the call, or relative to a tensor of the call."""
        plan = self._plan
        return plan.buffers[region.buffer] in _IN_WORKSPACE or (
            region.rank == plan.rank and region.buffer in self._tensors
        )

    def _place(self, region: Region) -> tuple[int, int]:
        view = self._at(region)
        if self._plan.buffers[region.buffer] in _IN_WORKSPACE:
            return -1, view.data_ptr()
        return self._places[region.buffer], view.data_ptr() - self._tensors[region.buffer].data_ptr()

    def _add_work(self, stream: int, work: Sequence[Work] | None) -> bool:
        """Append what a step computes. Return False if Python has to compute it."""
        if work is None:
            return False
        self._made = {}
        try:
            issued = [each.issued(self) for each in work]
        except _ElsewhereError:
            return False
        for name, *arguments in issued:
            getattr(self._program, name)(stream, *arguments)  # type: ignore[call-overload]
        return True

    def operand(self, operand: Operand) -> _C.Operand:
        """See `symm_overlap.runtime.work.Places`. Raises _ElsewhereError if its address may differ in the next call."""
        tensor = operand if isinstance(operand, Tensor) else operand.tensor
        if isinstance(operand, Fixed):
            return _C.Operand.fixed(tensor)
        index = self._made.get(id(tensor), self._indices.get(id(tensor)))
        if index is None:
            view = tensor_of(operand)
            if view.numel() and not self._stays(view):
                raise _ElsewhereError
            return _C.Operand.fixed(view)
        if isinstance(operand, Slice):
            return _C.Operand.slice(index, operand.dim, operand.start, operand.length)
        if isinstance(operand, Part):
            view = operand.view
            offset = int(view.storage_offset() - tensor.storage_offset())
            return _C.Operand.part(index, view.shape, view.stride(), offset)
        return _C.Operand.whole(index)

    def optional(self, operand: Operand | None) -> _C.Operand | None:
        """See `symm_overlap.runtime.work.Places`."""
        return None if operand is None else self.operand(operand)

    def made(self, tensor: Tensor) -> int:
        """See `symm_overlap.runtime.work.Places`. Every step starts from the same index."""
        return self._made.setdefault(id(tensor), self._given + len(self._made))

    def keep(self, used: object) -> None:
        """See `symm_overlap.runtime.work.Places`."""
        self.used.append(used)


class _ElsewhereError(Exception):
    """A tensor that only this call has created, so that the next call cannot find it."""


def _rows(to: Tensor, source: Tensor) -> tuple[int, int, int, int] | None:
    """Return the number of rows to copy, the bytes of a row, and the bytes from one row to the next in the target and
    in the source. None for any other layout, or if the number of elements differs.
    """
    if to.numel() != source.numel():
        return None
    if to.is_contiguous() and source.is_contiguous():
        return 1, to.nbytes, 0, 0
    if to.dim() != 2 or not all(view.shape[1] == 1 or view.stride(1) == 1 for view in (to, source)):
        return None
    size = to.element_size()
    return to.shape[0], to.shape[1] * size, to.stride(0) * size, source.stride(0) * size
