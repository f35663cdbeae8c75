"""The path for ranks that cannot reach each other's memory: chunked asynchronous collectives of torch.distributed.

While one chunk is under way, the matmul of another runs. Each function has the arguments and the results of its
namesake in `engine`. Bytes are what travels: every backend can carry them, whatever dtypes it knows. Sums are made
here, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import all_gather_single
from ..memory import timeout_ms
from .engine import Chunk, bounds, sum_partials
from .paths import Choice


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def _backend() -> Iterator[None]:
    """What the backends raise, also past a deadline, is a RuntimeError: tell it from what a matmul may raise."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistBackendError(str(error)) from error


def _start_all_gather(part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    gathered = part.new_empty(group.size(), *part.shape)
    send = part.contiguous()
    with _backend():
        work = all_gather_single(_bytes(gathered), _bytes(send), group=group, async_op=True)
    assert work is not None
    return gathered, work


def _finish(work: dist.Work, tensor: Tensor) -> None:
    """Let what follows on the caller's stream see the result; past the deadline, raise DistBackendError."""
    with _backend():
        if tensor.device.type == "cpu":
            work.wait(timedelta(milliseconds=timeout_ms()))
        else:
            work.wait()  # with a timeout it would block the host; a GPU backend has a deadline of its own


def all_gather(
    group: dist.ProcessGroup,
    choice: Choice,
    shard: Tensor,
    gathered: Callable[[int], Tensor] | None,
    consume: Callable[[Chunk, Tensor], object] | None,
) -> None:
    """Give every rank's shard to ``consume``, chunk by chunk, and keep a copy of all in ``gathered``."""
    rank, world = group.rank(), group.size()
    cut = bounds(shard.shape[0], choice.chunks)
    pieces = [slice(cut[piece], cut[piece + 1]) for piece in range(choice.chunks)]
    started = [_start_all_gather(shard[rows], group) for rows in pieces]
    for piece, rows in enumerate(pieces):
        if consume is not None:
            consume((rank, piece), shard[rows])
    for piece, (parts, work) in enumerate(started):
        _finish(work, shard)
        for step in range(1, world):
            owner = (rank + step) % world
            if consume is not None:
                consume((owner, piece), parts[owner])
        for owner in range(world) if gathered is not None else ():
            gathered(owner)[pieces[piece]].copy_(parts[owner])  # type: ignore[misc]


def _reduce_parts(
    group: dist.ProcessGroup,
    choice: Choice,
    produce: Callable[[Chunk, Tensor], object],
    part: Tensor,
    average: bool,
    whole: Callable[[int, int], int],
) -> None:
    """Sum every rank's chunks for this rank into ``part``. ``whole(owner, piece)`` is the number of rows of a chunk."""
    rank, world = group.rank(), group.size()
    columns = part.shape[1]
    started = []
    for piece in range(choice.chunks):
        length = max(whole(owner, piece) for owner in range(world))
        send = part.new_empty(world, length, columns)
        for step in range(1, world + 1):  # for rank + 1 first, the own one last
            owner = (rank + step) % world
            produce((owner, piece), send[owner, : whole(owner, piece)])
        received = send.new_empty(send.shape)
        with _backend():
            work = dist.all_to_all_single(_bytes(received), _bytes(send), group=group, async_op=True)
        started.append((send, received, work))
    start = 0
    for piece, (_send, received, work) in enumerate(started):
        _finish(work, part)
        length = whole(rank, piece)
        sum_partials([received[owner, :length] for owner in range(world)], average, part[start : start + length])
        start += length


def reduce_scatter(
    group: dist.ProcessGroup,
    choice: Choice,
    produce: Callable[[Chunk, Tensor], object],
    output: Tensor,
    *,
    average: bool,
) -> None:
    """Sum what every rank produces for this one, in rank order."""
    cut = bounds(output.shape[0], choice.chunks)
    _reduce_parts(group, choice, produce, output, average, lambda owner, piece: cut[piece + 1] - cut[piece])


def all_reduce(
    group: dist.ProcessGroup,
    choice: Choice,
    produce: Callable[[Chunk, Tensor], object],
    output: Tensor,
    *,
    average: bool,
) -> None:
    """Sum what every rank produces, in rank order, for all of them."""
    rank, world = group.rank(), group.size()
    parts = bounds(output.shape[0], world)
    cut = bounds(parts[1], choice.chunks)

    def whole(owner: int, piece: int) -> int:
        length = parts[owner + 1] - parts[owner]
        return min(length, cut[piece + 1]) - min(length, cut[piece])

    mine = output.new_empty(parts[1], output.shape[1])
    _reduce_parts(group, choice, produce, mine[: parts[rank + 1] - parts[rank]], average, whole)
    sums, work = _start_all_gather(mine, group)
    _finish(work, mine)
    for owner in range(world):
        output[parts[owner] : parts[owner + 1]].copy_(sums[owner, : parts[owner + 1] - parts[owner]])
