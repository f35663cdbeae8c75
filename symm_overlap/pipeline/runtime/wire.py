"""Send bytes between two ranks by torch.distributed, without waiting. They are kept until the receiver has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime import are_enqueued, wire_device

Channel = tuple[int, int]
"""(peer, number). Messages on one channel arrive in the order in which they were sent."""


def exchanges(peer: int, rank: int) -> tuple[bool, ...]:
    """Return in which order a rank exchanges something with a peer: True for the send. For itself, nothing.

    The lower rank sends first and the higher one receives first, and every rank exchanges with its peers in ascending
    order. So no ranks wait for each other in a circle, even if a message blocks its sender until it is received, as a
    large message over NCCL does.
    """
    return () if peer == rank else (rank < peer, peer < rank)


class Wire:
    """The point-to-point messages of one step. Each message consists of one or more tensors of bytes.

    Args:
        group: the group whose point-to-point messages are used. With gloo, channels do not block each other.
        device: the device of the tensors that will be sent.
        seconds: how long a wait may last.
        most: for some channels, a number of messages. When so many are in flight and another one is begun, the schedule
            guarantees that the receiver has received the oldest.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, seconds: float, most: Mapping[Channel, int]
    ) -> None:
        self._group, self._most = group, most
        self._seconds = seconds
        self._enqueued = are_enqueued(group, device)
        self.device = wire_device(group, device)
        self._sent: dict[Channel, deque[list[tuple[dist.Work | None, Tensor]]]] = {}

    def connect(self, rank: int, world: int) -> None:
        """Exchange a byte with every other rank, if the first message to a rank may block the host until the rank
        receives it. No schedule is made for such messages. Collective.

        See `exchanges` for their order.
        """
        for peer in range(world) if self._enqueued else ():
            for sends in exchanges(peer, rank):
                if sends:
                    self.begin((peer, 0))
                    self.send(torch.zeros(1, dtype=torch.uint8), (peer, 0))
                else:
                    self.receive(1, (peer, 0))
        self.release()

    def wait_at_most(self, seconds: float) -> None:
        """Bring the deadline of later waits forward."""
        self._seconds = min(self._seconds, seconds)

    def begin(self, to: Channel, *, in_turn: bool = True) -> None:
        """Begin a message. Earlier messages that the receiver has received for sure are released.

        Args:
            in_turn: True if the step follows the schedule, which guarantees that. False after a failure.
        """
        messages = self._sent.setdefault(to, deque())
        while in_turn and len(messages) >= self._most.get(to, len(messages) + 1):
            self._wait_for(to, messages.popleft())
        messages.append([])

    def send(self, tensor: Tensor, to: Channel) -> None:
        """Send one tensor of the message that was begun last."""
        tensor = tensor.to(self.device)
        with _named(to, "nothing can be sent to"):
            work = dist.isend(tensor, group=self._group, group_dst=to[0], tag=to[1])
        self._sent[to][-1].append((work, tensor))

    def receive(self, nbytes: int, channel: Channel, *, read: bool = False) -> Tensor:
        """Return the next ``nbytes`` bytes on a channel, on the device on which the group receives.

        Args:
            read: True if the host reads the bytes now, so that it has to wait for them in any case.
        """
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with _named(channel, "nothing came from"):
            work = dist.irecv(tensor, group=self._group, group_src=channel[0], tag=channel[1])
            self._wait(work, read)
        return tensor

    def release(self, without: Collection[int] = ()) -> None:
        """Wait until the receivers have received everything, except the peers in ``without``."""
        sent, self._sent = self._sent, {}
        for channel, messages in sent.items():
            for message in messages if channel[0] not in without else ():
                self._wait_for(channel, message)

    def _wait_for(self, to: Channel, message: list[tuple[dist.Work | None, Tensor]]) -> None:
        for work, _ in message:
            with _named(to, "a message was not received by"):
                self._wait(work)

    def _wait(self, work: dist.Work | None, read: bool = False) -> None:
        """Wait for a message until the deadline. If it is enqueued, and the host does not read it, only the current
        stream waits: with a deadline, the host would.
        """
        if work is None:
            return
        if self._enqueued and not read:
            work.wait()
        else:
            work.wait(timedelta(seconds=self._seconds))


@contextmanager
def _named(channel: Channel, what: str) -> Iterator[None]:
    """Add the rank to errors of torch.distributed, which do not name it."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistBackendError(f"pipeline step: {what} rank {channel[0]}: {error}") from None
