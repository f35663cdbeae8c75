"""An all-gather-matmul in one kernel, which starts with the own rows while the others come."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....plan import Plan, Step, Table
from ...layouts import PartsLayout
from ...planners import fused_all_gather_matmul, one_launch
from ..call import Call
from ..planned.gather import Gather
from .flagged import FlaggedKernel
from .matmuls import factors_of


class FusedGather(Gather):
    """See `symm_overlap.collective.exchange.fused.all_gather`.

    Args:
        consumer: one that `matmuls.has_kernel` accepts.
    """

    scriptable = False  # a step that raises a flag touches no memory that plans know

    def __init__(self, call: Call, parts: PartsLayout, shard: Tensor, consumer: Any, gathered: Tensor | None) -> None:
        self.kernel = FlaggedKernel(call, "all_gather_matmul", parts.total_rows)
        self.factors, self.row_scale = factors_of(consumer)
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

    def note(self) -> None:
        """See `Run.note`."""
        super().note()
        self.kernel.note(self.outputs, self.shard, self.gathered, self.factors, row_scale=self.row_scale)

    def _issue(self, parity: int) -> None:
        self.kernel.begin()
        super()._issue(parity)
        self.kernel.finish(self.outputs)

    def _tiles(self, step: Step) -> None:
        self.kernel.launch(self.shard, self.gathered, self.factors, row_scale=self.row_scale)
