"""Reductions of a product that one kernel computes. Rows are pushed to their owners as soon as they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....plan import Region, Step, Table
from ....runtime import Sum, Work, carry_out
from ...choosing.plans import fused_plan
from ...parts.protocol import Producer
from ...planners import one_launch
from ..bounds import bounds, piece_rows
from ..call import Call
from .flagged import FlaggedKernel, Operands
from .matmuls import matmul_of
from .run import FusedRun


class _FusedReduction(FusedRun):
    """The base class of both reductions.

    Args:
        producer: a producer that `matmuls.can_produce` accepts.
        output: (rows, columns), contiguous.
        total: the number of rows of the product, which are divided among ranks. It need not be a multiple of the world
            size.
        average: whether the sum is divided by the world size.
        dtype: the dtype of the product; None: that of the output.
    """

    def __init__(
        self,
        call: Call,
        producer: Any,
        output: Tensor,
        total: int,
        average: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.output, self.average, columns = output, average, output.shape[1]
        self.dtype = dtype or output.dtype
        self.kernel = FlaggedKernel(call, "matmul_reduce_scatter", total, columns)
        plans = call.route.plans
        plan = plans.get("fused")
        if plan is None:
            plan = plans["fused"] = one_launch(fused_plan(call.problem, call.choice, call.rank))
        self.parts = bounds(total, call.world)
        self.cut = bounds(self.parts[1], call.choice.chunks)
        self.product = output.new_empty(total, columns, dtype=self.dtype)
        self.matmul = matmul_of(call, producer, self.product)
        unit = self.cut[1] * columns * self.dtype.itemsize
        tensors = {"output": output, "product": self.product}
        rows, row_scale, factor = self.matmul
        described = self.kernel.described([rows, *factor.tensors, row_scale], [self.product], factor.fast)
        super().__init__(call, plan, [output], tensors, *described, workspace=unit)

    def rows_of(self, owner: int, piece: int) -> int:
        """Return how many rows a chunk has. The chunks of the last ranks may be short or empty."""
        return piece_rows(self.cut, self.parts[owner + 1] - self.parts[owner], piece)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        owner, piece = divmod(region.start, self.call.choice.chunks)
        if region.buffer == "workspace":  # its chunks are all for the rank that has the memory
            return self.shared(region, (self.rows_of(region.rank, piece), self.output.shape[1]), self.dtype)
        start = self.parts[owner] + self.cut[piece]
        return (self.product if region.buffer == "product" else self.output)[start : start + self.rows_of(owner, piece)]

    def steps(self) -> Table:
        """See `Run.steps`."""
        return {"tiles": self._tiles, "poll": self.kernel.poll, "push": self._copy, "reduce": self._reduce}

    def work(self, step: Step) -> Sequence[Work] | None:
        """See `Run.work`."""
        if step.kind != "reduce":
            return self.kernel.work(step, self.multiplied())
        return [Sum([self.operand(region) for region in step.reads], self.average, *map(self.operand, step.writes))]

    def multiplied(self) -> Operands:
        """See `FusedRun.multiplied`."""
        rows, row_scale, factor = self.matmul
        return (rows, factor), row_scale

    def _reduce(self, step: Step) -> None:
        work = self.work(step)
        assert work is not None
        carry_out(self.call.backend, work)


class FusedScatterReduction(_FusedReduction):
    """See `symm_overlap.collective.exchange.fused.reduce_scatter`."""

    def __init__(self, call: Call, producer: Producer, output: Tensor, average: bool) -> None:
        total = call.world * output.shape[0]
        super().__init__(call, producer, output, total, average, producer.dtype)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        if region.buffer != "output":
            return super().view(region)
        return self.output[self.cut[region.start] : self.cut[region.start + 1]]


class FusedAllReduction(_FusedReduction):
    """See `symm_overlap.collective.exchange.fused.all_reduce`."""

    def __init__(self, call: Call, producer: Any, output: Tensor, average: bool) -> None:
        super().__init__(call, producer, output, output.shape[0], average)
