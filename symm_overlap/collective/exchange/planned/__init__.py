"""The planned exchange: run a plan on this lane's symmetric memory.

It binds the plan's buffers to tensors and the plan's kinds of step to work. It knows neither shapes nor matmuls: a
consumer or a producer (`symm_overlap.collective.parts`) says what is done with a part. Where buffers lie in the
workspace follows from the plan (`symm_overlap.plan.layout`).

Every exchange has these three functions.
"""

from __future__ import annotations

from torch import Tensor

from ...layouts import PartsLayout
from ...parts import Consumer, Producer
from ...row_parts import RowProducer
from ..call import Call
from .gather import Gather
from .reduction import AllReduction, OneShotAllReduction, ScatterReduction

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """Give every rank's shard to ``consumer``, and keep a copy of all in ``gathered``.

    Args:
        parts: how the ranks' shards lie in the gathered tensor.
        shard: (rows, columns), the own one. Contiguous.
        gathered: the flat gathered tensor, where the caller wants it.
    """
    Gather(call, parts, shard, consumer, gathered).run()


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """Sum what every rank produces for this one, in rank order, into ``output``: (rows, columns), contiguous."""
    ScatterReduction(call, producer, output, average).run()


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """Sum what every rank produces, in rank order, for all of them, into ``output``: (rows, columns), contiguous."""
    (OneShotAllReduction if call.choice.one_shot else AllReduction)(call, producer, output, average).run()
