"""Reductions that run a plan: partial results of all ranks are summed in rank order, for one rank each or for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....plan import Plan, Region, Step, Table
from ....runtime import Part, Sum, Work
from ...choosing.plans import reduction_plan
from ...parts.described import DescribedParts, DescribedRows
from ...parts.protocol import Producer, RowProducer
from ...planners import (
    one_shot_all_reduce,
    produce_all_reduce,
    produce_reduce_scatter,
    produce_then_all_reduce,
    produce_then_reduce_scatter,
)
from ..bounds import bounds, element_bounds, piece_rows
from ..call import Call
from .run import Run, scratch


class _Reduction(Run):
    """The base class of reductions.

    Attributes:
        producer: computes the partial results.
        average: whether the sum is divided by the number of ranks.
        output: (rows, columns), the sum.
        stage: memory for copies of the peers' partial results; None if the plan makes no copies.
    """

    producer: Any
    average: bool
    output: Tensor
    stage: Tensor | None

    def _tensors(self) -> dict[str, Tensor]:
        return {"output": self.output} if self.stage is None else {"output": self.output, "stage": self.stage}

    def _described(self) -> tuple[Any, ...]:
        """Return the operands and the variant of the producer's work, if it describes its work as data."""
        producer = self.producer
        return (producer.operands, producer.variant) if isinstance(producer, (DescribedParts, DescribedRows)) else ()

    def steps(self) -> Table:
        """See `Run.steps`."""
        return {"produce": self._produce, "reduce": self._reduce}

    def work(self, step: Step) -> Sequence[Work] | None:
        """See `Run.work`."""
        if step.kind == "reduce":
            out, *copy = (self.operand(region) for region in step.writes)
            return [Sum([self.operand(region) for region in step.reads], self.average, out, *copy)]
        if step.kind != "produce" or not isinstance(self.producer, (DescribedParts, DescribedRows)):
            return None
        if step.chunk is None:
            return self.producer.work(self.at(step.writes[0]))
        return self._part_work(*step.chunk, self.operand(step.writes[0]))

    def _part_work(self, owner: int, piece: int, out: Tensor | Part) -> Sequence[Work] | None:
        """Return the work that produces a chunk as data, or None if the producer cannot describe it."""
        return None

    def _produce(self, step: Step) -> None:
        raise NotImplementedError

    def _reduce(self, step: Step) -> None:
        targets = [self.at(region) for region in step.writes]
        self.call.backend.sum([self.at(region) for region in step.reads], self.average, *targets)


class ScatterReduction(_Reduction):
    """See `symm_overlap.collective.exchange.planned.reduce_scatter`."""

    producer: Producer

    def __init__(self, call: Call, producer: Producer, output: Tensor, average: bool) -> None:
        self.producer, self.output, self.average = producer, output, average
        self.dtype = producer.dtype or output.dtype
        choice = call.choice
        planner = produce_then_reduce_scatter if choice.whole else produce_reduce_scatter
        kept = {"keep": True} if producer.kept else {}
        if not choice.whole and producer.kept_sum is not None:
            kept["own"] = True
        plan = _plan(planner, call, **kept)
        rows, columns = output.shape
        self.chunks = choice.chunks
        self.cut = bounds(rows, self.chunks)
        self.stage = scratch(plan, "stage", lambda: output.new_empty(call.world, rows, columns, dtype=self.dtype))
        unit = self.cut[1] * columns * self.dtype.itemsize
        super().__init__(call, plan, [output, *producer.kept], self._tensors(), *self._described(), workspace=unit)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        rows, columns = self.output.shape
        if region.stop - region.start > 1:  # the parts for several ranks, or for all
            return self.shared(region, ((region.stop - region.start) * rows, columns), self.dtype)
        rank, piece = divmod(region.start, self.chunks)
        start, stop = self.cut[piece], self.cut[piece + 1]
        if region.buffer == "workspace":
            return self.shared(region, (stop - start, columns), self.dtype)
        if region.buffer == "stage":
            assert self.stage is not None
            return self.stage[rank, start:stop]
        if region.buffer == "product":
            assert self.producer.kept_sum is not None
            return self.producer.kept_sum[rank * rows + start : rank * rows + stop]
        return self.output if self.chunks == 1 else self.output[start:stop]

    def operand(self, region: Region) -> Tensor | Part:
        """See `Run.operand`."""
        if region.buffer == "product":
            assert self.producer.kept_sum is not None
            return Part(self.producer.kept_sum, self.at(region))
        return super().operand(region)

    def _produce(self, step: Step) -> None:
        out = self.at(step.writes[0])
        if step.chunk is None:
            self.producer.whole(out)
        else:
            self.producer.part(step.chunk[0], self.cut[step.chunk[1]], out)

    def _part_work(self, owner: int, piece: int, out: Tensor | Part) -> Sequence[Work] | None:
        assert isinstance(self.producer, DescribedParts)
        return self.producer.part_work(owner, self.cut[piece], out)


class AllReduction(_Reduction):
    """See `symm_overlap.collective.exchange.planned.all_reduce`."""

    def __init__(self, call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
        self.producer, self.average = producer, average
        choice = call.choice
        planner = produce_then_all_reduce if choice.whole else produce_all_reduce
        plan = _plan(planner, call)
        # Without chunks, elements and not rows are divided among ranks, as there may be fewer rows than ranks.
        self.output = output.view(-1, 1) if choice.whole else output
        self.chunks = choice.chunks
        rows, itemsize = self.output.shape[0], output.element_size()
        self.parts = element_bounds(rows, call.world, itemsize) if choice.whole else bounds(rows, call.world)
        self.cut = bounds(self.parts[1], self.chunks)
        columns = self.output.shape[1]
        self.stage = scratch(plan, "stage", lambda: output.new_empty(call.world, self.parts[1], columns))
        unit = self.cut[1] * columns * output.element_size()
        super().__init__(call, plan, [output], self._tensors(), *self._described(), workspace=unit)

    def _length(self, owner: int, piece: int) -> int:
        """Return how many rows a chunk has. The chunks of the last ranks may be short or empty."""
        return piece_rows(self.cut, self.parts[owner + 1] - self.parts[owner], piece)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        columns, dtype = self.output.shape[1], self.output.dtype
        if region.stop - region.start > 1:  # the parts of several ranks, or of all
            return self.shared(region, (self.parts[region.stop] - self.parts[region.start], columns), dtype)
        rank, piece = divmod(region.start, self.chunks)
        if region.buffer == "workspace":
            return self.shared(region, (self._length(rank, piece), columns), dtype)
        if region.buffer == "stage":
            assert self.stage is not None
            start = self.cut[piece]
            return self.stage[rank, start : start + self._length(self.call.rank, piece)]
        start = self.parts[rank] + self.cut[piece]
        return self.output[start : start + self._length(rank, piece)]

    def _produce(self, step: Step) -> None:
        out = self.at(step.writes[0])
        if step.chunk is None:
            self.producer.whole(out)
        else:
            owner, piece = step.chunk
            self.producer.rows(self.parts[owner] + self.cut[piece], out)

    def _part_work(self, owner: int, piece: int, out: Tensor | Part) -> Sequence[Work] | None:
        assert isinstance(self.producer, DescribedRows)
        return self.producer.rows_work(self.parts[owner] + self.cut[piece], out)


class OneShotAllReduction(_Reduction):
    """See `symm_overlap.collective.exchange.planned.all_reduce`. Every rank sums the whole tensor, which is small."""

    def __init__(self, call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
        self.producer, self.output, self.average = producer, output, average
        plan = _plan(one_shot_all_reduce, call)
        self.stage = scratch(plan, "stage", lambda: output.new_empty(call.world, *output.shape))
        super().__init__(call, plan, [output], self._tensors(), *self._described(), workspace=output.nbytes)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        if region.buffer == "workspace":
            return self.shared(region, tuple(self.output.shape), self.output.dtype)
        if region.buffer == "stage":
            assert self.stage is not None
            return self.stage[region.start]
        return self.output

    def _produce(self, step: Step) -> None:
        self.producer.whole(self.at(step.writes[0]))


def _plan(planner: Callable[..., Plan], call: Call, **arguments: bool) -> Plan:
    """Return the plan of a call. It is computed once for each route; ``arguments`` are the same for all its calls."""
    plan: Plan | None = call.route.plans.get(planner)
    if plan is None:
        # Without chunks nothing hides a copy, so the sum reads the peers' memory directly, on any device.
        in_place = call.backend.traits.in_place or call.choice.whole
        plan = reduction_plan(planner, call.choice, call.rank, call.world, in_place=in_place, **arguments)
        call.route.plans[planner] = plan
    return plan
