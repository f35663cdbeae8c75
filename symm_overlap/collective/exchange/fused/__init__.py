"""The fused exchange: one kernel multiplies, and waits for rows that copies bring, or signals rows it has computed.

Like `planned`, it runs plans on symmetric memory. The kernel is one step of the plan. Either the kernel waits inside
for flags that steps on the copy streams set, or those steps wait for flags that the kernel sets. A call for which there
is no kernel is passed to `planned`.

On a CPU the kernels run in Triton's interpreter, so that they can be tested with real ranks and without a GPU.
"""

from __future__ import annotations

from torch import Tensor

from ...layouts import PartsLayout
from ...parts.protocol import Consumer, Producer, RowProducer
from .. import planned
from ..call import Call
from .gather import FusedGather
from .matmuls import can_consume, can_produce
from .reduction import FusedAllReduction, FusedScatterReduction

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """See `planned.all_gather`."""
    if can_consume(call, consumer) and not parts.last:
        FusedGather(call, parts, shard, consumer, gathered).run()
    else:
        planned.all_gather(call, parts, shard, consumer, gathered)


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """See `planned.reduce_scatter`."""
    if can_produce(call, producer):
        FusedScatterReduction(call, producer, output, average).run()
    else:
        planned.reduce_scatter(call, producer, output, average)


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """See `planned.all_reduce`."""
    if can_produce(call, producer):
        FusedAllReduction(call, producer, output, average).run()
    else:
        planned.all_reduce(call, producer, output, average)
