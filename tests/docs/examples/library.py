"""An exchange through the blocking collectives of torch.distributed, which sum in whatever order the library likes."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from symm_overlap._torch import all_gather_single, reduce_scatter_single
from symm_overlap.collective.exchange.call import Call
from symm_overlap.collective.layouts import PartsLayout
from symm_overlap.collective.parts import Consumer, Producer
from symm_overlap.collective.row_parts import RowProducer


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """Give every rank's shard to ``consumer``, and keep a copy of all in ``gathered`` where the caller wants it."""
    whole = parts.new_gathered(shard) if gathered is None else gathered
    stacked = shard.new_empty(call.world * shard.shape[0], shard.shape[1])
    with call.turn() as group:  # the lane's group, for this call alone; a failure in here breaks the lane
        all_gather_single(stacked, shard, group=group)
    for rank, part in enumerate(stacked.chunk(call.world)):
        parts.part(whole, rank).copy_(part)
    if consumer is not None:
        consumer.whole(whole)


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """Sum what every rank produces for this one into ``output``: (rows, columns), contiguous."""
    product = output.new_empty(call.world * output.shape[0], output.shape[1])
    producer.whole(product)
    with call.turn() as group:
        reduce_scatter_single(output, product, group=group)
    if average:
        output.div_(call.world)


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """Sum what every rank produces, for all of them, into ``output``: (rows, columns), contiguous."""
    producer.whole(output)
    with call.turn() as group:
        dist.all_reduce(output, group=group)
    if average:
        output.div_(call.world)
