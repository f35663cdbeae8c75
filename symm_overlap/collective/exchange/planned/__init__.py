"""The planned exchange: run a plan on this lane's symmetric memory.

It binds the plan's buffers to tensors, and the plan's kinds of step to functions. It knows neither shapes nor matmuls:
a consumer or a producer (`symm_overlap.collective.parts`) defines the work on a part. The offsets of buffers in the
workspace are derived from the plan (`symm_overlap.plan.layout`).

Every exchange has these three functions.
"""

from __future__ import annotations

from torch import Tensor

from ...layouts import PartsLayout
from ...parts.protocol import Consumer, Producer, RowProducer
from ..call import Call
from .gather import Gather
from .reduction import AllReduction, OneShotAllReduction, ScatterReduction

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """Pass every rank's shard to ``consumer``, and copy all shards to ``gathered``.

    Args:
        parts: how the ranks' shards are arranged in the gathered tensor.
        shard: (rows, columns), contiguous: this rank's own shard.
        consumer: the work on the shards; None if nothing is computed with them.
        gathered: the flat gathered tensor, if the caller needs it, otherwise None.
    """
    Gather(call, parts, shard, consumer, gathered).run()


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """Sum the parts that all ranks produce for this rank, in rank order, into ``output``: (rows, columns), contiguous.

    With ``average`` the sum is divided by the world size.
    """
    ScatterReduction(call, producer, output, average).run()


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """Sum the results of all ranks, in rank order, into ``output`` on every rank: (rows, columns), contiguous.

    With ``average`` the sum is divided by the world size.
    """
    (OneShotAllReduction if call.choice.one_shot else AllReduction)(call, producer, output, average).run()
