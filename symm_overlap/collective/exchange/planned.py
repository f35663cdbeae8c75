"""The planned exchange: run a plan on this lane's symmetric memory.

It binds the plan's buffers to tensors and the plan's kinds of step to work. It knows neither shapes nor matmuls: a
consumer or a producer (`symm_overlap.collective.parts`) says what is done with a part. Where buffers lie in the
workspace follows from the plan (`symm_overlap.plan.layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...plan import Layout, Plan, Region, Step, execute, layout
from ...settings import Transform
from ..layouts import PartsLayout
from ..parts import Consumer, Producer, RowProducer
from ..planners import (
    all_gather_consume,
    gather_then_consume,
    produce_all_reduce,
    produce_reduce_scatter,
    produce_then_all_reduce,
    produce_then_reduce_scatter,
)
from .bounds import bounds, piece_rows
from .call import Call

View = Callable[[Region, int], Tensor]
"""The tensor at a region of a buffer, for a call that uses this half of the workspace."""


def _layout(plan: Plan, unit_bytes: tuple[tuple[str, int], ...]) -> Layout:
    """The layout of a plan, made once and kept with the plan."""
    found: Layout | None = plan.derived.get(unit_bytes)
    if found is None:
        found = plan.derived[unit_bytes] = layout(plan, dict(unit_bytes))
    return found


class _Run:
    """One call: its plan, where its buffers lie, and what runs its steps.

    Args:
        unit_bytes: for each buffer in the workspace, the bytes of its largest unit.
    """

    def __init__(self, call: Call, plan: Plan, outputs: Sequence[Tensor], **unit_bytes: int) -> None:
        self.call, self.plan, self.outputs = call, plan, outputs
        self.layout = _layout(plan, tuple(unit_bytes.items()))
        self.workspace = call.lane.workspace
        self.parity = 0
        self.views: dict[str, Callable[[Region], Tensor]] = {}
        self.table: dict[str, Callable[[Step], object]] = {}

    def shared(self, region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a region of a buffer in the workspace."""
        place = self.layout
        offset = place.offset[region.buffer] + region.start * place.stride[region.buffer]
        return self.workspace.view(region.rank, self.parity, offset, shape, dtype)

    def copy(self, step: Step) -> None:
        """Run a publish or pull step."""
        source, target = step.reads[0], step.writes[0]
        self.call.backend.copy(self.views[target.buffer](target), self.views[source.buffer](source))

    def __call__(self, parity: int) -> None:
        """Run every step, in this half of the workspace."""
        self.parity = parity
        table = {"publish": self.copy, "pull": self.copy, **self.workspace.steps(), **self.table}
        transforms: tuple[Transform, ...] = self.call.settings.transforms
        for transform in transforms:
            table = dict(transform(self.plan, table))
        execute(self.plan, table, self.call.lane.streams)

    def run(self) -> None:
        """Make the call."""
        try:
            self.call.run(self, self.outputs, self.layout.nbytes, self.plan.channels)
        finally:
            # Their functions refer to this object: a cycle would keep the call's tensors until the next collection.
            self.views, self.table = {}, {}


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """Give every rank's shard to ``consumer``, and keep a copy of all in ``gathered``.

    Args:
        shard: (rows, columns), the own one. Contiguous.
        gathered: the flat gathered tensor, where the caller wants it.
    """
    choice, traits = call.choice, call.backend.traits
    rows, columns = shard.shape
    keep, in_place = gathered is not None, traits.in_place
    plan = (
        gather_then_consume(
            call.rank,
            call.world,
            in_place=in_place,
            keep=keep,
            consume=consumer is not None,
            symmetric=call.symmetric,
        )
        if choice.whole
        else all_gather_consume(
            call.rank,
            call.world,
            chunks=choice.chunks,
            compute=choice.compute,
            copy=choice.copy,
            in_place=in_place,
            keep=keep,
            consume=consumer is not None,
            accumulate=consumer is not None and consumer.accumulates,
            symmetric=call.symmetric,
            # Where a signal is a kernel, the own shard's matmul would hold it up if that came first.
            outbound=choice.copy if in_place else choice.compute[0],
        )
    )
    cut = bounds(rows, choice.chunks)
    outputs = [] if consumer is None else list(consumer.outputs)
    if gathered is not None:
        outputs.append(gathered)
    elif "gathered" in plan.extents:  # scratch, made here because several streams use it
        gathered = parts.new_gathered(shard)
    run = _Run(call, plan, outputs, workspace=cut[1] * columns * shard.element_size(), offset=8)

    def from_input(region: Region) -> Tensor:
        piece = region.start
        if region.rank == call.rank:
            tensor = shard
        else:
            offset = int(run.shared(Region("offset", region.rank, 0, 1), (1,), torch.int64))
            tensor = call.peer_shard(shard, region.rank, offset)
        return tensor if choice.chunks == 1 else tensor[cut[piece] : cut[piece + 1]]

    def from_workspace(region: Region) -> Tensor:
        return run.shared(region, (cut[region.start + 1] - cut[region.start], columns), shard.dtype)

    def from_gathered(region: Region) -> Tensor:
        assert gathered is not None
        owner, piece = divmod(region.start, choice.chunks)
        part = parts.part(gathered, owner)
        return part if choice.chunks == 1 else part[cut[piece] : cut[piece + 1]]

    def consume(step: Step) -> None:
        assert consumer is not None
        region = step.reads[0]
        if step.chunk is not None:
            consumer.part(step.chunk[0], cut[step.chunk[1]], run.views[region.buffer](region))
        elif region.buffer == "gathered":
            assert gathered is not None
            consumer.whole(gathered)
        else:
            shards = step.reads[: call.world]
            consumer.shards([run.views[region.buffer](region) for region in shards])

    def announce(step: Step) -> None:
        run.shared(step.writes[0], (1,), torch.int64).fill_(int(shard.storage_offset()))

    run.views = {"input": from_input, "workspace": from_workspace, "gathered": from_gathered}
    run.table = {"consume": consume, "announce": announce}
    run.run()


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """Sum what every rank produces for this one, in rank order, into ``output``: (rows, columns), contiguous."""
    choice, in_place = call.choice, call.backend.traits.in_place
    planner = produce_then_reduce_scatter if choice.whole else produce_reduce_scatter
    how = {} if choice.whole else {"chunks": choice.chunks, "compute": choice.compute, "copy": choice.copy}
    plan = planner(call.rank, call.world, in_place=in_place, **how)
    rows, columns = output.shape
    chunks, dtype = choice.chunks, output.dtype
    cut = bounds(rows, chunks)
    run = _Run(call, plan, [output], workspace=cut[1] * columns * output.element_size())
    stage = None if "stage" not in plan.extents else output.new_empty(call.world, rows, columns)

    def from_workspace(region: Region) -> Tensor:
        if region.stop - region.start > 1:
            return run.shared(region, (call.world * rows, columns), dtype)
        piece = region.start % chunks
        return run.shared(region, (cut[piece + 1] - cut[piece], columns), dtype)

    def from_stage(region: Region) -> Tensor:
        assert stage is not None
        producer_rank, piece = divmod(region.start, chunks)
        return stage[producer_rank, cut[piece] : cut[piece + 1]]

    def produce(step: Step) -> None:
        out = from_workspace(step.writes[0])
        if step.chunk is None:
            producer.whole(out)
        else:
            producer.part(step.chunk[0], cut[step.chunk[1]], out)

    def reduce(step: Step) -> None:
        region = step.writes[0]
        out = output if chunks == 1 else output[cut[region.start] : cut[region.start + 1]]
        call.backend.sum([run.views[each.buffer](each) for each in step.reads], average, out)

    run.views = {"workspace": from_workspace, "stage": from_stage}
    run.table = {"produce": produce, "reduce": reduce}
    run.run()


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """Sum what every rank produces, in rank order, for all of them, into ``output``: (rows, columns), contiguous."""
    choice, in_place = call.choice, call.backend.traits.in_place
    planner = produce_then_all_reduce if choice.whole else produce_all_reduce
    how = {} if choice.whole else {"chunks": choice.chunks, "compute": choice.compute, "copy": choice.copy}
    plan = planner(call.rank, call.world, in_place=in_place, **how)
    # At once, ranks share out elements and not rows: there may be fewer rows than ranks.
    flat = output.view(-1, 1) if choice.whole else output
    columns, chunks, dtype = flat.shape[1], choice.chunks, flat.dtype
    parts = bounds(flat.shape[0], call.world)
    cut = bounds(parts[1], chunks)
    unit = cut[1] * columns * flat.element_size()
    run = _Run(call, plan, [output], workspace=unit, reduced=unit)
    stage = None if "stage" not in plan.extents else flat.new_empty(call.world, parts[1], columns)

    def length(owner: int, piece: int) -> int:
        return piece_rows(cut, parts[owner + 1] - parts[owner], piece)

    def from_workspace(region: Region) -> Tensor:
        if region.stop - region.start > 1:
            return run.shared(region, tuple(flat.shape), dtype)
        owner, piece = divmod(region.start, chunks)
        return run.shared(region, (length(owner, piece), columns), dtype)

    def from_reduced(region: Region) -> Tensor:
        return run.shared(region, (length(region.rank, region.start), columns), dtype)

    def from_stage(region: Region) -> Tensor:
        assert stage is not None
        producer_rank, piece = divmod(region.start, chunks)
        return stage[producer_rank, cut[piece] : cut[piece] + length(call.rank, piece)]

    def from_output(region: Region) -> Tensor:
        owner, piece = divmod(region.start, chunks)
        start = parts[owner] + cut[piece]
        return flat[start : start + length(owner, piece)]

    def produce(step: Step) -> None:
        out = from_workspace(step.writes[0])
        if step.chunk is None:
            producer.whole(out)
        else:
            producer.rows(parts[step.chunk[0]] + cut[step.chunk[1]], out)

    def reduce(step: Step) -> None:
        targets = [run.views[region.buffer](region) for region in step.writes]
        call.backend.sum([run.views[region.buffer](region) for region in step.reads], average, *targets)

    run.views = {"workspace": from_workspace, "reduced": from_reduced, "stage": from_stage, "output": from_output}
    run.table = {"produce": produce, "reduce": reduce}
    run.run()
