"""An all-gather-matmul in one kernel, which starts with the own rows while the others come."""

from __future__ import annotations

from torch import Tensor

from ....plan import Plan, Step, Table
from ...layouts import PartsLayout
from ...parts import Products
from ...planners import fused_all_gather_matmul, one_launch
from ..call import Call
from ..planned.gather import Gather
from .flagged import FlaggedKernel


class FusedGather(Gather):
    """See `symm_overlap.collective.exchange.fused.all_gather`."""

    scriptable = False  # a step that raises a flag touches no memory that plans know

    def __init__(
        self, call: Call, parts: PartsLayout, shard: Tensor, consumer: Products, gathered: Tensor | None
    ) -> None:
        self.kernel, self.products = FlaggedKernel(call, "all_gather_matmul", parts.rows), consumer
        super().__init__(call, parts, shard, consumer, gathered)

    def plan_of(self, call: Call, keep: bool, consume: bool, accumulate: bool) -> Plan:
        """See `Gather.plan_of`."""
        choice = call.choice
        return one_launch(
            fused_all_gather_matmul(
                call.rank,
                call.world,
                chunks=choice.chunks,
                stream=choice.compute[0],
                copy=choice.copy,
                keep=keep,
                symmetric=call.symmetric,
                announce=call.backend.traits.announces,
            )
        )

    def steps(self) -> Table:
        """See `Run.steps`."""
        return {"announce": self._announce, "raise": self.kernel.up, "tiles": self._tiles}

    def watched(self, table: Table) -> Table:
        """See `Run.watched`."""
        return self.kernel.watched(table)

    def _issue(self, parity: int) -> None:
        self.kernel.begin()
        super()._issue(parity)
        self.kernel.finish(self.outputs)

    def _tiles(self, step: Step) -> None:
        kernel = self.kernel
        for weight, product in zip(self.products.Bs, self.products.outputs, strict=True):
            kernel.module.all_gather_matmul(
                self.shard, self.gathered, weight, product, kernel.flags, kernel.place, kernel.machine
            )
