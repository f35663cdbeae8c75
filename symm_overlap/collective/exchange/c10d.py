"""The exchange through torch.distributed, for ranks that cannot reach each other's memory.

With chunks, the matmul of one chunk runs while another chunk is in flight. A call without chunks is the plain
collective, for instance a gather straight into the output and then one matmul. Data is sent as bytes, because every
back end can carry bytes, whatever dtypes it supports.

Sums are computed here, in rank order, so that they have the same bits in every run and on every path. A reduce-scatter
is therefore an all-to-all and a sum. It receives as many bytes as the library's reduce-scatter in a ring, but keeps all
partial results until they are summed. If any order is allowed (`symm_overlap.sum_order`), a reduction without chunks is
the library's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch import all_gather_single, reduce_scatter_single
from ..layouts import PartsLayout
from ..parts.protocol import Consumer, Producer, RowProducer
from .bounds import bounds, piece_rows
from .call import Call


def _bytes(tensor: Tensor) -> Tensor:
    # A tensor of one element is contiguous with any stride, but only stride 1 can be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def _backend_errors() -> Iterator[None]:
    """Turn the RuntimeError of a back end into DistBackendError, to distinguish it from an error of a matmul."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistBackendError(str(error)) from error


class _Collectives:
    """The asynchronous collectives of one call."""

    def __init__(self, call: Call, group: dist.ProcessGroup) -> None:
        self._call, self._group = call, group

    def all_gather(self, gathered: Tensor, shard: Tensor) -> dist.Work:
        """Start to gather contiguous ``shard`` into contiguous ``gathered``."""
        with _backend_errors():
            work = all_gather_single(_bytes(gathered), _bytes(shard), group=self._group, async_op=True)
        assert work is not None
        return work

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Start to exchange the rows of two contiguous tensors of one shape, (world, ...)."""
        with _backend_errors():
            work: dist.Work | None = dist.all_to_all_single(
                _bytes(received), _bytes(sent), group=self._group, async_op=True
            )
        assert work is not None
        return work

    def reduce_scatter(self, part: Tensor, product: Tensor) -> dist.Work:
        """Start to sum contiguous ``product``, (world * rows, columns), into contiguous ``part``, in any order."""
        with _backend_errors():
            work = reduce_scatter_single(part, product, group=self._group, async_op=True)
        assert work is not None
        return work

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start to sum contiguous ``tensor`` over ranks, in place, in any order."""
        with _backend_errors():
            work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None
        return work

    def finish(self, work: dist.Work) -> None:
        """Make later work on the caller's stream wait for the result; past the deadline, raise DistBackendError."""
        with _backend_errors():
            if self._call.backend.traits.library_collectives:
                work.wait()  # with a timeout, wait() would block the host; the library has its own deadline
            else:
                work.wait(timedelta(seconds=self._call.settings.seconds))


def connect(call: Call) -> None:
    """Create the group of the call's lane and connect the ranks. Otherwise the lane's first collective does that."""
    byte = torch.empty(1, dtype=torch.uint8, device=call.lane.device)
    with call.turn() as group:
        collectives = _Collectives(call, group)
        collectives.finish(collectives.all_gather(byte.new_empty(call.world), byte))


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """See `planned.all_gather`."""
    with call.turn() as group:
        collectives = _Collectives(call, group)
        if call.choice.whole or (call.choice.chunks == 1 and gathered is not None and not parts.last):
            _gather_whole(call, collectives, parts, shard, consumer, gathered)
        else:
            _gather_chunks(call, collectives, parts, shard, consumer, gathered)


def _gather_whole(
    call: Call,
    collectives: _Collectives,
    parts: PartsLayout,
    shard: Tensor,
    consumer: Consumer | None,
    gathered: Tensor | None,
) -> None:
    """Gather with one collective, straight into the gathered tensor; blocks of columns are put in order afterwards."""
    flat = parts.new_gathered(shard) if gathered is None else gathered
    stacked = flat.new_empty(call.world, *shard.shape) if parts.last else flat
    work = collectives.all_gather(stacked, shard)
    overlap = consumer is not None and not call.choice.whole
    if overlap:
        consumer.part(call.rank, 0, shard)  # type: ignore[union-attr]
    collectives.finish(work)
    if parts.last:
        flat.unflatten(1, (call.world, parts.columns)).copy_(stacked.movedim(0, 1))
    if consumer is None:
        return
    if not overlap:
        consumer.whole(flat)
        return
    for step in range(1, call.world):
        owner = (call.rank + step) % call.world
        consumer.part(owner, 0, parts.part(flat, owner))


def _gather_chunks(
    call: Call,
    collectives: _Collectives,
    parts: PartsLayout,
    shard: Tensor,
    consumer: Consumer | None,
    gathered: Tensor | None,
) -> None:
    """Gather with one collective for each piece. All are in flight while this rank's own shard is consumed."""
    cut = bounds(shard.shape[0], call.choice.chunks)
    started = []
    for piece in range(call.choice.chunks):
        mine = shard[cut[piece] : cut[piece + 1]]
        stacked = mine.new_empty(call.world, *mine.shape)
        started.append((stacked, collectives.all_gather(stacked, mine)))
    if consumer is not None:
        for start, stop in itertools.pairwise(cut):
            consumer.part(call.rank, start, shard[start:stop])
    for piece, (stacked, work) in enumerate(started):
        collectives.finish(work)
        for step in range(1, call.world):
            owner = (call.rank + step) % call.world
            if consumer is not None:
                consumer.part(owner, cut[piece], stacked[owner])
        for owner in range(call.world) if gathered is not None else ():
            parts.part(gathered, owner)[cut[piece] : cut[piece + 1]].copy_(stacked[owner])  # type: ignore[arg-type]


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """See `planned.reduce_scatter`."""
    if _in_any_order(call):
        with call.turn() as group:
            collectives = _Collectives(call, group)
            product = _at_once(call, producer, output).to(output.dtype)  # the library returns the dtype that it gets
            collectives.finish(collectives.reduce_scatter(output, product))
        if average:
            output.div_(call.world)
        return
    rows, columns = output.shape
    cut = bounds(rows, call.choice.chunks)
    with call.turn() as group:
        collectives = _Collectives(call, group)
        started = []
        for start, stop in itertools.pairwise(cut):
            if call.choice.whole:
                sent = _at_once(call, producer, output).unflatten(0, (call.world, rows))
            else:
                sent = output.new_empty(call.world, stop - start, columns, dtype=producer.dtype)
                for step in range(1, call.world + 1):  # for rank + 1 first, for this rank last
                    owner = (call.rank + step) % call.world
                    producer.part(owner, start, sent[owner])
            received = torch.empty_like(sent)
            started.append((sent, received, collectives.all_to_all(received, sent)))
        for (start, stop), (_, received, work) in zip(itertools.pairwise(cut), started, strict=True):
            collectives.finish(work)
            call.backend.sum(list(received), average, output[start:stop])


def _in_any_order(call: Call) -> bool:
    """True if a reduction may be the library's own."""
    return call.choice.whole and call.settings.order == "any"


def _at_once(call: Call, producer: Producer, output: Tensor) -> Tensor:
    """Return the results that this rank computes for all ranks, in rank order."""
    if producer.made is not None:
        return producer.made
    product = output.new_empty(call.world * output.shape[0], output.shape[1], dtype=producer.dtype)
    producer.whole(product)
    return product


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """See `planned.all_reduce`. Partial results are exchanged and summed, and then the sums are gathered."""
    if _in_any_order(call):
        with call.turn() as group:
            producer.whole(output)
            collectives = _Collectives(call, group)
            collectives.finish(collectives.all_reduce(output))
        if average:
            output.div_(call.world)
        return
    flat = output.view(-1, 1) if call.choice.whole else output
    columns = flat.shape[1]
    parts = bounds(flat.shape[0], call.world)
    cut = bounds(parts[1], call.choice.chunks)
    with call.turn() as group:
        collectives = _Collectives(call, group)
        started = []
        for piece in range(call.choice.chunks):
            sent = flat.new_empty(call.world, cut[piece + 1] - cut[piece], columns)
            _produce_rows(call, producer, sent, parts, cut, piece, flat.shape[0])
            received = torch.empty_like(sent)
            started.append((sent, received, collectives.all_to_all(received, sent)))
        mine = flat.new_empty(parts[1], columns)
        for piece, (_, received, work) in enumerate(started):
            collectives.finish(work)
            call.backend.sum(list(received), average, mine[cut[piece] : cut[piece + 1]])
        if flat.shape[0] == call.world * parts[1]:  # no padding: gather straight into the output
            collectives.finish(collectives.all_gather(flat, mine))
            return
        sums = flat.new_empty(call.world * parts[1], columns)
        collectives.finish(collectives.all_gather(sums, mine))
        flat.copy_(sums[: flat.shape[0]])


def _produce_rows(
    call: Call,
    producer: RowProducer,
    sent: Tensor,
    parts: tuple[int, ...],
    cut: tuple[int, ...],
    piece: int,
    total: int,
) -> None:
    """Fill ``sent`` with the rows for each rank. Padding after the last rows, which no rank needs, is zeroed."""
    if call.choice.whole:
        rows = sent.flatten(0, 1)
        producer.whole(rows[:total])
        rows[total:].zero_()
        return
    for step in range(1, call.world + 1):
        owner = (call.rank + step) % call.world
        length = piece_rows(cut, parts[owner + 1] - parts[owner], piece)
        producer.rows(parts[owner] + cut[piece], sent[owner, :length])
        sent[owner, length:].zero_()
