"""Messages by torch.distributed, for ranks that do not reach each other's memory, and for the first step.

A message says first what it is, so shapes may change from step to step. A step that fails on one rank is ended on all:
in place of each message that it cannot send any more, the rank sends why, and it takes all that others still send to
it. So no rank waits for a message that never comes, and the next step finds nothing of this one on its way. The last
message between any two ranks says that the step went well: it does on all ranks, or on none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ...plan import Step
from ...runtime import wire_device
from ..action import RECV_B, RECV_F, SEND_B, SEND_F
from .message import Message, Value, place, size_of

SENDS = frozenset({SEND_F, SEND_B})
RECEIVES = frozenset({RECV_F, RECV_B})

ENDED = 1 << 9
"""The channel on which a rank says that its step went well."""

_HEADER = 512  # bytes, which hold what all but the strangest messages are
_NUMBERS = 16  # bytes of its two numbers: the length of what follows, and of the text
_FAILED = -1
"""Instead of a length: what follows says why the message will never come."""


class PeerFailedError(dist.DistBackendError):
    """Another rank has failed in this step, and said so."""


class C10dTransport:
    """Sends each message with torch.distributed, and ahead of it what it is, so that shapes may change.

    Attributes:
        ends: the messages of `confirm`, in the form of a plan's steps.

    Args:
        group: whose point-to-point messages to use. Messages of one link keep their order; with gloo those of different
            links between two ranks need not.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._wire = wire_device(group, device)
        self._sent: list[tuple[dist.Work | None, Tensor, Step]] = []
        self._done: set[int] = set()  # the steps whose messages are on their way, or have come, by id
        self.ends = [
            Step(kind, "compute", peer=peer, channel=ENDED, label="the step went well")
            for kind in (SEND_B, RECV_B)
            for peer in range(group.size())
            if peer != group.rank()
        ]

    def send(self, step: Step, message: Message, tensors: Sequence[Tensor]) -> None:
        """See `Transport`."""
        text = json.dumps([value.as_data() for value in message])
        memory = torch.empty(size_of(message), dtype=torch.uint8, device=self._device)
        for part, tensor in zip(place(message, _parts_of(memory)), tensors, strict=True):
            part.copy_(tensor)
        self._done.add(id(step))
        self._send_text(step, memory.numel(), text)
        if memory.numel():
            self._send(memory, step)

    def fail(self, steps: Sequence[Step], error: BaseException) -> None:
        """End a step that failed: tell the receivers of messages that these will never come, and take what does.

        Args:
            steps: all steps of this rank, also those that have been done, and `ends` if `confirm` is called.
        """
        reason = f"{type(error).__name__}: {error}"
        silent: set[int | None] = set()  # dead, or too late: nothing more is to be had from them
        for step in steps:
            if step.kind in SENDS and id(step) not in self._done and step.peer not in silent:
                try:
                    self._send_text(step, _FAILED, json.dumps([reason]))
                except dist.DistBackendError:
                    silent.add(step.peer)
        if not isinstance(error, Exception):  # Ctrl-C: nobody waits any more
            return
        for step in steps:
            if step.kind in RECEIVES and id(step) not in self._done and step.peer not in silent:
                try:
                    self.receive(step)
                except PeerFailedError:
                    pass
                except dist.DistBackendError:
                    silent.add(step.peer)
        self._sent = [sent for sent in self._sent if sent[2].peer not in silent]
        with suppress(dist.DistBackendError):
            self.release()  # until then the messages, and what they are sent from, must live

    def receive(self, step: Step) -> tuple[Message, list[Tensor]]:
        """See `Transport`.

        Raises:
            PeerFailedError: the sender has failed.
            torch.distributed.DistBackendError: the sender has died, or did not send in time.
        """
        self._done.add(id(step))
        header = self._receive(torch.empty(_HEADER, dtype=torch.uint8), step).cpu()
        length, following = header[:_NUMBERS].view(torch.int64).tolist()
        data = header[_NUMBERS : _NUMBERS + following]
        if following > len(data):
            data = torch.cat([data, self._receive(torch.empty(following - len(data), dtype=torch.uint8), step).cpu()])
        text = bytes(data.tolist()).decode()
        if length == _FAILED:
            raise PeerFailedError(f"pipeline step: rank {step.peer} has failed: {json.loads(text)[0]}")
        message = tuple(Value.from_data(each) for each in json.loads(text))
        memory = torch.empty(size_of(message), dtype=torch.uint8, device=self._device)
        if memory.numel():
            memory = self._receive(memory, step).to(self._device)
        return message, place(message, _parts_of(memory))

    def confirm(self) -> None:
        """The step went well here: wait until it has everywhere.

        Raises:
            PeerFailedError, torch.distributed.DistBackendError: it has not; see `receive`.
        """
        for step in self.ends:
            if step.kind == SEND_B:
                self.send(step, (), ())
            else:
                self.receive(step)
        self.release()

    def release(self) -> None:
        """Wait until the receivers have taken all that was sent."""
        while self._sent:
            work, _, step = self._sent.pop()
            with _named(step, "nothing was taken by"):
                _wait(work)

    def _send_text(self, step: Step, length: int, text: str) -> None:
        """A header of fixed size, so that its receiver needs to know nothing, and what of the text does not fit it."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        header[:_NUMBERS] = torch.tensor([length, len(data)]).view(torch.uint8)
        fits = min(len(data), _HEADER - _NUMBERS)
        header[_NUMBERS : _NUMBERS + fits] = data[:fits]
        self._send(header, step)
        if fits < len(data):
            self._send(data[fits:], step)

    def _send(self, tensor: Tensor, step: Step) -> None:
        tensor = tensor.to(self._wire)
        with _named(step, "nothing can be sent to"):
            work = dist.isend(tensor, group=self._group, group_dst=step.peer, tag=step.channel or 0)
        self._sent.append((work, tensor, step))

    def _receive(self, tensor: Tensor, step: Step) -> Tensor:
        """Fill ``tensor``, or one like it where the group can receive, with what comes on the step's link."""
        tensor = tensor.to(self._wire)
        with _named(step, "nothing came from"):
            _wait(dist.irecv(tensor, group=self._group, group_src=step.peer, tag=step.channel or 0))
        return tensor


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@contextmanager
def _named(step: Step, what: str) -> Iterator[None]:
    """Errors of the library, which do not say which rank they are about."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistBackendError(f"pipeline step: {what} rank {step.peer}: {error}") from None


def _parts_of(memory: Tensor) -> Callable[[int, tuple[int, ...], torch.dtype], Tensor]:
    """For `place`: parts of some memory."""

    def part(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = Value(shape, dtype, False).nbytes
        return memory[offset : offset + nbytes].view(dtype).view(shape)

    return part
