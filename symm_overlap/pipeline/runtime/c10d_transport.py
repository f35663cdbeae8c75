"""Messages by torch.distributed, for ranks that cannot reach each other's memory, and for the first step.

A message begins with a description of its tensors, so shapes may change from step to step. If a step fails on one rank,
it ends on all ranks. In place of each message that the rank can no longer send, it sends the reason, and it still
receives everything that the others send to it. So no rank waits for a message that never comes, and no message of this
step is in flight when the next step begins. The last message between any two ranks confirms that the step succeeded. So
a step succeeds on all ranks or on none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from ...plan import Step
from ..action import RECV_B, RECVS, SEND_B, SENDS
from .message import Message, Value, place, size_of
from .wire import Channel, Wire, exchanges

SUCCESS_CHANNEL = 1 << 9
"""The channel on which a rank confirms that its step went well."""

_HEADER = 512  # bytes, enough for the description of almost every message
_NUMBERS = 24  # bytes of the numbers in the header: the length of the tensors, that of the text, and the step's number
_FAILED = -1
"""This in place of the length means that the message will never come. The text then says why."""


def exchanged_with(peer: int, rank: int) -> tuple[str, ...]:
    """Return the kinds of the steps of `exchanges`, in their order."""
    return tuple(SEND_B if sends else RECV_B for sends in exchanges(peer, rank))


class PeerFailedError(dist.DistBackendError):
    """Another rank has failed in this step, and has reported it."""


class C10dTransport:
    """Sends each message with torch.distributed, after a description of its tensors.

    Attributes:
        confirmations: the messages of `confirm`, in the form of a plan's steps.

    Args:
        wire: carries the bytes of this step.
        rank, world: this rank, and the world size.
        device: the device of received tensors.
        number: the number of this step, the same on every rank.
    """

    def __init__(self, wire: Wire, rank: int, world: int, device: torch.device, number: int) -> None:
        self._wire, self._device, self._number = wire, device, number
        self._done: set[int] = set()  # ids of the steps whose send or receive has begun
        # For each step whose header has come, by id, its channel and the number of bytes that are still to come.
        self._pending_bytes: dict[int, tuple[Channel, int]] = {}
        self.confirmations = [
            Step(kind, "compute", peers=(peer,), channel=SUCCESS_CHANNEL, label="the step went well")
            for peer in range(world)
            for kind in exchanged_with(peer, rank)
        ]

    def send(self, step: Step, message: Message, tensors: Sequence[Tensor]) -> Message:
        """See `Transport`."""
        text = json.dumps([value.as_data() for value in message])
        memory = torch.empty(size_of(message), dtype=torch.uint8, device=self._device)
        for part, tensor in zip(place(message, _parts_of(memory)), tensors, strict=True):
            part.copy_(tensor)
        to = _channel(step)
        self._wire.begin(to)
        self._done.add(id(step))
        self._send_text(to, memory.numel(), text)
        if memory.numel():
            self._wire.send(memory, to)
        return message

    def receive(self, step: Step) -> tuple[Message, list[Tensor]]:
        """See `Transport`.

        Raises:
            PeerFailedError: the sender has failed.
            torch.distributed.DistBackendError: the sender has died, did not send in time, or is in another step.
        """
        text, nbytes, number = self._receive_text(step)
        if number != self._number:
            raise dist.DistBackendError(
                f"pipeline step: rank {step.peer} is in its step {number} on this lane, and this rank is in its step "
                f"{self._number}: one of them has rejected or left out a step. Use another lane (symm_overlap.lane) "
                "on every rank, or a new group"
            )
        message = tuple(Value.from_data(each) for each in json.loads(text))
        memory = self._receive_pending(id(step)) if nbytes else torch.empty(0, dtype=torch.uint8)
        tensors = place(message, _parts_of(memory.to(self._device)))
        # Views of one memory share a version counter, and a stage may change one of them in place.
        return message, [tensor.clone() for tensor in tensors] if len(tensors) > 1 else tensors

    def confirm(self) -> None:
        """Confirm that the step went well on this rank, and wait until it has on all ranks.

        Raises:
            PeerFailedError, torch.distributed.DistBackendError: it failed on another rank; see `receive`.
        """
        for step in self.confirmations:
            if step.kind == SEND_B:
                self.send(step, (), ())
            else:
                self.receive(step)
        self.release()

    def release(self) -> None:
        """Wait until the receivers have received everything that was sent."""
        self._wire.release()

    def fail(self, steps: Sequence[Step], error: BaseException, patience: float = inf) -> None:
        """End a step that failed: notify the receivers of its missing messages, and receive what the others still send.

        Args:
            steps: all steps of this rank, also those that are done, and `confirmations` if `confirm` would be called.
            error: why the step failed. The receivers get it as text.
            patience: the most seconds to wait for a peer, if no later step uses this group of ranks.
        """
        self._wire.wait_at_most(patience)
        text = json.dumps([f"{type(error).__name__}: {error}"])
        silent: set[int] = set()  # peers that are dead or too late: nothing more will come from them
        for step in (each for each in steps if each.kind in SENDS and id(each) not in self._done):
            to = _channel(step)
            if to[0] not in silent:
                try:
                    self._wire.begin(to, in_turn=False)
                    self._send_text(to, _FAILED, text)
                except Exception:
                    silent.add(to[0])
        for step in (each for each in steps if each.kind in RECVS):
            peer = _channel(step)[0]
            if peer not in silent and (id(step) not in self._done or id(step) in self._pending_bytes):
                try:
                    self._discard(step)
                except Exception:
                    silent.add(peer)
        with suppress(dist.DistBackendError):
            self._wire.release(without=silent)  # until it returns, the messages and their memory must stay alive

    def _discard(self, step: Step) -> None:
        """Receive what is left of a message, and discard it."""
        if id(step) not in self._done:
            try:
                self._receive_text(step)
            except PeerFailedError:
                return
        if id(step) in self._pending_bytes:
            self._receive_pending(id(step))

    def _send_text(self, to: Channel, length: int, text: str) -> None:
        """Send a header with three numbers and the text, and then the rest of a text that does not fit into the header.

        The header has a fixed size, so that the receiver can receive it without knowing anything about the message.
        """
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        numbers = [length, len(data), self._number]
        header[:_NUMBERS] = torch.tensor(numbers).view(torch.uint8)
        fits = min(len(data), _HEADER - _NUMBERS)
        header[_NUMBERS : _NUMBERS + fits] = data[:fits]
        self._wire.send(header, to)
        if fits < len(data):
            self._wire.send(data[fits:], to)

    def _receive_text(self, step: Step) -> tuple[str, int, int]:
        """Receive the text that describes a message. Return it, the number of bytes that follow, and the number of the
        sender's step.
        """
        channel = _channel(step)
        self._done.add(id(step))
        header = self._wire.receive(_HEADER, channel, read=True).cpu()
        length, following, number = header[:_NUMBERS].view(torch.int64).tolist()
        data = header[_NUMBERS : _NUMBERS + following]
        if following > len(data):
            data = torch.cat([data, self._wire.receive(following - len(data), channel, read=True).cpu()])
        text = bytes(data.tolist()).decode()
        if length == _FAILED:
            raise PeerFailedError(f"pipeline step: rank {step.peer} has failed: {json.loads(text)[0]}")
        if length:
            self._pending_bytes[id(step)] = channel, length
        return text, length, number

    def _receive_pending(self, step: int) -> Tensor:
        channel, nbytes = self._pending_bytes[step]
        memory = self._wire.receive(nbytes, channel)
        del self._pending_bytes[step]
        return memory


def _channel(step: Step) -> Channel:
    return step.peer, step.channel or 0


def _parts_of(memory: Tensor) -> Callable[[int, tuple[int, ...], torch.dtype], Tensor]:
    """Return the function that `place` calls for the parts of some memory."""

    def part(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = Value(shape, dtype, False).nbytes
        return memory[offset : offset + nbytes].view(dtype).view(shape)

    return part
