"""Messages through slots in symmetric memory, and what every transport of messages does.

A sender puts a message into its slot at the receiver, raises a signal, and goes on. What a rank receives is copied out
of the slot, so that the slot may be used again as `symm_overlap.pipeline.slots` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ...plan import Step
from ...runtime import Backend, Workspace
from ..action import RECV_F, SEND_B, SEND_F
from ..slots import Link
from .message import Message, gradients_of, place, size_of

Messages = Mapping[tuple[int, int], Message]
"""For each (stage, microbatch), what the stage hands to the next one, which is on another rank."""


class Transport(Protocol):
    """Carries the messages of one step."""

    def send(self, step: Step, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors``, of which ``message`` says what they are, to ``step.peer``."""

    def receive(self, step: Step) -> tuple[Message, list[Tensor]]:
        """What ``step.peer`` sends: what it is, and the tensors, which nobody else has."""


def link_of(step: Step) -> tuple[int, str]:
    """The key of the link whose message a step receives."""
    assert step.chunk is not None
    return (step.chunk[0] - 1, SEND_F) if step.kind == RECV_F else (step.chunk[0] + 1, SEND_B)


class Slots:
    """Where the slots of every link lie in a half of the workspace of its receiver.

    Attributes:
        nbytes: what the links of the rank that needs most take, so that all ranks have halves of one size.
    """

    def __init__(self, links: Mapping[tuple[int, str], Link], messages: Messages) -> None:
        self.links, self.messages = links, messages
        ends: dict[int, int] = {}
        self._offset: dict[tuple[int, str], int] = {}
        self._stride: dict[tuple[int, str], int] = {}
        for key, link in links.items():
            stride = max((size_of(self.message(key, each)) for each in link.slot_of), default=0)
            self._offset[key], self._stride[key] = ends.get(link.target, 0), stride
            ends[link.target] = self._offset[key] + link.slots * stride
        self.nbytes = max(ends.values(), default=0)

    def message(self, key: tuple[int, str], microbatch: int) -> Message:
        """What a link's message of a microbatch is."""
        stage, kind = key
        if kind == SEND_F:
            return self.messages[stage, microbatch]
        return gradients_of(self.messages[stage - 1, microbatch])

    def offset(self, key: tuple[int, str], microbatch: int) -> int:
        """The byte of the half at which that message starts."""
        return self._offset[key] + self.links[key].slot_of[microbatch] * self._stride[key]


class SymmetricTransport:
    """Puts each message into its slot at the receiver, and raises a signal behind it.

    Args:
        parity: the half of the workspace that this step uses.
    """

    def __init__(self, slots: Slots, workspace: Workspace, backend: Backend, parity: int) -> None:
        self._slots, self._workspace, self._backend, self._parity = slots, workspace, backend, parity
        meets = workspace.steps()
        self._signal, self._wait = meets["signal"], meets["wait"]

    def send(self, step: Step, message: Message, tensors: Sequence[Tensor]) -> None:
        """See `Transport`."""
        assert step.chunk is not None
        key, microbatch = (step.chunk[0], step.kind), step.chunk[1]
        _require_same(step, self._slots.message(key, microbatch), message)
        for slot, tensor in zip(self._place(key, microbatch, step.peer, message), tensors, strict=True):
            self._backend.copy(slot, tensor.resolve_conj().resolve_neg())
            self._backend.keep_for_current_stream(tensor)
        self._signal(step)

    def receive(self, step: Step) -> tuple[Message, list[Tensor]]:
        """See `Transport`."""
        assert step.chunk is not None
        key, microbatch = link_of(step), step.chunk[1]
        message = self._slots.message(key, microbatch)
        slots = self._place(key, microbatch, self._slots.links[key].target, message)
        received = [self._backend.new_output(slot, *slot.shape) for slot in slots]
        self._wait(step)
        for tensor, slot in zip(received, slots, strict=True):
            self._backend.copy(tensor, slot)
        return message, received

    def _place(self, key: tuple[int, str], microbatch: int, rank: int, message: Message) -> list[Tensor]:
        start = self._slots.offset(key, microbatch)
        return place(
            message,
            lambda offset, shape, dtype: self._workspace.view(rank, self._parity, start + offset, shape, dtype),
        )


def _require_same(step: Step, expected: Message, found: Message) -> None:
    """Raise ValueError where a message is not what the ranks have agreed on."""
    if found != expected:
        assert step.chunk is not None
        raise ValueError(
            f"stage {step.chunk[0]}, microbatch {step.chunk[1]}: {step.kind} has {_listed(found)}, and in the first "
            f"step it had {_listed(expected)}. Messages through symmetric memory have the shapes of the first step: "
            'use transport="c10d" for shapes that change, or another PipelineRuntime for each'
        )


def _listed(message: Message) -> str:
    return ", ".join(f"{value}{'' if value.differentiable else ' without gradient'}" for value in message) or "nothing"
