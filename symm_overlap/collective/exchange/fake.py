"""The exchange of a group without peers (torch's "fake" back end). Sizes, strides and memory are as in a real call.

The values are made up: a gather uses this rank's shard in place of every shard, and a sum is only this rank's part.
"""

from __future__ import annotations

from torch import Tensor

from ..layouts import PartsLayout
from ..parts.protocol import Consumer, Producer, RowProducer
from .call import Call
from .single import produce


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """See `planned.all_gather`."""
    for step in range(call.world):
        rank = (call.rank + step) % call.world
        if consumer is not None:
            consumer.part(rank, 0, shard)
        if gathered is not None:
            parts.part(gathered, rank).copy_(shard)


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """See `planned.reduce_scatter`."""
    for owner in [*range(call.world), call.rank] if producer.kept else [call.rank]:
        produce(producer, owner, output)


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """See `planned.all_reduce`."""
    producer.rows(0, output)
