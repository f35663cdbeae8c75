"""The interface of transports of messages, and the transport through slots in symmetric memory.

A sender puts a message into its slot at the receiver, raises a signal, and goes on. The receiver copies the message out
of the slot, so that the slot can be used again, as `symm_overlap.pipeline.slots` describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from ...plan import Step
from ...runtime import Backend, Workspace
from ..action import RECV_F, SEND_B, SEND_F
from ..slots import Link
from .message import Message, gradients_of, place, size_of

Messages = Mapping[tuple[int, int], Message]
"""For each (stage, microbatch), what the stage passes to the next one, which is on another rank."""


class Transport(Protocol):
    """Carries the messages of one step."""

    def send(self, step: Step, message: Message, tensors: Sequence[Tensor]) -> Message:
        """Send ``tensors``, which ``message`` describes, to ``step.peer``. Return the description that it gets."""

    def receive(self, step: Step) -> tuple[Message, list[Tensor]]:
        """Receive what ``step.peer`` sends. Return its description and its tensors, which only the caller uses."""


def link_of(step: Step) -> tuple[int, str]:
    """Return the key of the link whose message a step receives."""
    assert step.chunk is not None
    return (step.chunk[0] - 1, SEND_F) if step.kind == RECV_F else (step.chunk[0] + 1, SEND_B)


class Slots:
    """The layout of the slots of every link in a half of the workspace of its receiver.

    Attributes:
        links: the links of the schedule.
        messages: the descriptions of their messages.
        nbytes: the bytes of the rank that needs the most for its links. All ranks use this as the size of a half.
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
        """Return the description of a link's message of a microbatch."""
        stage, kind = key
        if kind == SEND_F:
            return self.messages[stage, microbatch]
        return gradients_of(self.messages[stage - 1, microbatch])

    def offset(self, key: tuple[int, str], microbatch: int) -> int:
        """Return the byte of the half at which that message starts."""
        return self._offset[key] + self.links[key].slot_of[microbatch] * self._stride[key]


class SymmetricTransport:
    """Puts each message into its slot at the receiver, and then raises a signal.

    Args:
        slots: the layout of the slots.
        workspace: the symmetric memory of the lane.
        backend: copies tensors and allocates them.
        parity: the half of the workspace that this step uses.
    """

    def __init__(self, slots: Slots, workspace: Workspace, backend: Backend, parity: int) -> None:
        self._slots, self._workspace, self._backend, self._parity = slots, workspace, backend, parity
        meets = workspace.steps()
        self._signal, self._wait = meets["signal"], meets["wait"]

    def send(self, step: Step, message: Message, tensors: Sequence[Tensor]) -> Message:
        """See `Transport`. The description is always that of the first step.

        If a value has required a gradient then and does not now, because what computes it was frozen, its gradient is
        still sent back. The stage ignores it.
        """
        assert step.chunk is not None
        key, microbatch = (step.chunk[0], step.kind), step.chunk[1]
        agreed = self._slots.message(key, microbatch)
        _require_agreed(step, agreed, message)
        message = agreed
        for slot, tensor in zip(self._place(key, microbatch, step.peer, message), tensors, strict=True):
            source = tensor.resolve_conj().resolve_neg()
            if type(source) in (Tensor, nn.Parameter):
                self._backend.copy(slot, source)
            else:  # it may have no memory of its own, as the result of a functional collective until somebody waits
                slot.copy_(source)
            self._backend.keep_for_current_stream(tensor)
        self._signal(step)
        return message

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


def _require_agreed(step: Step, agreed: Message, found: Message) -> None:
    """Raise ValueError if the receiver cannot take a message for the one that the ranks agreed on in the first step."""
    if len(found) != len(agreed) or not all(
        then in (now, now._replace(differentiable=True)) for then, now in zip(agreed, found, strict=True)
    ):
        assert step.chunk is not None
        raise ValueError(
            f"stage {step.chunk[0]}, microbatch {step.chunk[1]}: {step.kind} has {_listed(found)}, and in the first "
            f"step it had {_listed(agreed)}. Messages through symmetric memory must have the shapes of the first "
            "step, and no value may require a gradient that required none then: use "
            'transport="c10d" for messages that change, or a separate PipelineRuntime for each kind'
        )


def _listed(message: Message) -> str:
    return ", ".join(f"{value}{'' if value.differentiable else ' without gradient'}" for value in message) or "nothing"
