"""An all-gather-matmul in one kernel, which starts with this rank's own rows while the other rows arrive."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from ....plan import Plan, Step, Table
from ....runtime import Work
from ...choosing.plans import fused_plan
from ...layouts import PartsLayout
from ...planners import one_launch
from ..call import Call
from ..planned.gather import Gather
from .flagged import FlaggedKernel, Operands
from .matmuls import factors_of
from .run import FusedRun


class FusedGather(FusedRun, Gather):
    """See `symm_overlap.collective.exchange.fused.all_gather`.

    Args:
        consumer: a consumer that `matmuls.can_consume` accepts.
    """

    def __init__(self, call: Call, parts: PartsLayout, shard: Tensor, consumer: Any, gathered: Tensor | None) -> None:
        self.kernel = FlaggedKernel(call, "all_gather_matmul", parts.total_rows)
        self.factors, self.row_scale = factors_of(call, consumer)
        super().__init__(call, parts, shard, consumer, gathered)

    def plan_of(self, call: Call, keep: bool, consume: bool, accumulate: bool) -> Plan:
        """See `Gather.plan_of`."""
        announced = {"symmetric": call.symmetric, "announce_offset": call.backend.traits.announces_offset}
        return one_launch(fused_plan(call.problem, call.choice, call.rank, keep=keep, **announced))

    def steps(self) -> Table:
        """See `Run.steps`."""
        return {"announce": self._announce, "raise": self.kernel.up, "tiles": self._tiles}

    def described(self) -> tuple[Sequence[Tensor], Hashable]:
        """See `Gather.described`."""
        operands = [each for factor in self.factors for each in (*factor.tensors, factor.product)]
        fast = tuple(factor.fast for factor in self.factors)
        return self.kernel.described([*operands, self.row_scale], [self.shard, self.gathered], fast)

    def work(self, step: Step) -> Sequence[Work] | None:
        """See `Run.work`."""
        return super().work(step) if step.kind in ("publish", "pull") else self.kernel.work(step, self.multiplied())

    def multiplied(self) -> Operands:
        """See `FusedRun.multiplied`."""
        return (self.shard, self.gathered, self.factors), self.row_scale
