"""An exchange through the blocking collectives of torch.distributed. The library chooses the order of the sums."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from symm_overlap._torch import all_gather_single, reduce_scatter_single
from symm_overlap.collective.exchange.call import Call
from symm_overlap.collective.layouts import PartsLayout
from symm_overlap.collective.parts.protocol import Consumer, Producer, RowProducer


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """Pass the shards of all ranks to ``consumer``, and copy them into ``gathered`` if it is not None."""
    whole = parts.new_gathered(shard) if gathered is None else gathered
    stacked = shard.new_empty(call.world * shard.shape[0], shard.shape[1])
    with call.turn() as group:  # the lane's group, reserved for this call; a failure inside breaks the lane
        all_gather_single(stacked, shard, group=group)
    for rank, part in enumerate(stacked.chunk(call.world)):
        parts.part(whole, rank).copy_(part)
    if consumer is not None:
        consumer.whole(whole)


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """Write the sum of all ranks' products for this rank into ``output``: (rows, columns), contiguous."""
    product = output.new_empty(call.world * output.shape[0], output.shape[1])
    producer.whole(product)
    with call.turn() as group:
        reduce_scatter_single(output, product, group=group)
    if average:
        output.div_(call.world)


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """Write the sum of all ranks' products into ``output``, on every rank: (rows, columns), contiguous."""
    producer.whole(output)
    with call.turn() as group:
        dist.all_reduce(output, group=group)
    if average:
        output.div_(call.world)
