"""A matmul-reduce-scatter in one kernel, whose rows go to their owners as soon as they are made."""

from __future__ import annotations

from torch import Tensor

from ....plan import Region, Step, Table
from ...parts import ScatteredProducts
from ...planners import fused_matmul_reduce_scatter, one_launch
from ..bounds import bounds
from ..call import Call
from ..planned.run import Run
from .flagged import FlaggedKernel


class FusedScatterReduction(Run):
    """See `symm_overlap.collective.exchange.fused.reduce_scatter`.

    Args:
        producer: with one matmul and no addend.
    """

    scriptable = False  # steps that poll a flag touch no memory that plans know

    def __init__(self, call: Call, producer: ScatteredProducts, output: Tensor, average: bool) -> None:
        self.producer, self.output, self.average = producer, output, average
        self.kernel = FlaggedKernel(call, "matmul_reduce_scatter", output.shape[0])
        choice, plans = call.choice, call.route.plans
        plan = plans.get("fused")
        if plan is None:
            plan = plans["fused"] = one_launch(
                fused_matmul_reduce_scatter(
                    call.rank, call.world, chunks=choice.chunks, stream=choice.compute[0], copy=choice.copy
                )
            )
        rows, columns = output.shape
        self.cut = bounds(rows, choice.chunks)
        self.product = output.new_empty(call.world, rows, columns)
        unit = self.cut[1] * columns * output.element_size()
        super().__init__(call, plan, [output], {"output": output, "product": self.product}, workspace=unit)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        rank, piece = divmod(region.start, self.call.choice.chunks)
        start, stop = self.cut[piece], self.cut[piece + 1]
        if region.buffer == "workspace":
            return self.shared(region, (stop - start, self.output.shape[1]), self.output.dtype)
        return (self.product[rank] if region.buffer == "product" else self.output)[start:stop]

    def steps(self) -> Table:
        """See `Run.steps`."""
        return {"tiles": self._tiles, "poll": self.kernel.poll, "push": self._copy, "reduce": self._reduce}

    def watched(self, table: Table) -> Table:
        """See `Run.watched`."""
        return self.kernel.watched(table)

    def _issue(self, parity: int) -> None:
        self.kernel.begin()
        super()._issue(parity)
        self.kernel.finish(self.outputs)

    def _tiles(self, step: Step) -> None:
        kernel, producer = self.kernel, self.producer
        kernel.module.matmul_reduce_scatter(
            producer.As[0], producer.Bs[0], self.product.flatten(0, 1), kernel.flags, kernel.place, kernel.machine
        )

    def _reduce(self, step: Step) -> None:
        partials = [self.at(region) for region in step.reads]
        self.call.backend.sum(partials, self.average, self.at(step.writes[0]))
