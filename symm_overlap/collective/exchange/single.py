"""The exchange of a group of one rank: nothing travels."""

from __future__ import annotations

from torch import Tensor

from ..layouts import PartsLayout
from ..parts.protocol import Consumer, Producer, RowProducer
from .call import Call


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """See `planned.all_gather`."""
    if consumer is not None:
        consumer.part(0, 0, shard)
    if gathered is not None:
        gathered.copy_(shard)


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """See `planned.reduce_scatter`."""
    produce(producer, 0, output)


def produce(producer: Producer, owner: int, output: Tensor) -> None:
    """Write this rank's part for ``owner`` to ``output``, which may have another dtype."""
    if producer.dtype in (None, output.dtype):
        producer.part(owner, 0, output)
        return
    part = output.new_empty(output.shape, dtype=producer.dtype)
    producer.part(owner, 0, part)
    output.copy_(part)


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """See `planned.all_reduce`."""
    producer.rows(0, output)
