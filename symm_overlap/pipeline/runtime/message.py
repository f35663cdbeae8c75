"""The description of the tensors of one message, and their layout in the memory that carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan.layout import ALIGNMENT


class Value(NamedTuple):
    """The description of one tensor that a stage passes to the next.

    Attributes:
        shape, dtype: of the tensor. It arrives contiguous, whatever its strides were.
        differentiable: True if the tensor requires gradients on the sender. Then its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{tuple(self.shape)} of {self.dtype}"

    def as_data(self) -> list[Any]:
        """Return the value in a form that JSON can store."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.differentiable]

    @staticmethod
    def from_data(data: Sequence[Any]) -> Value:
        """Return the value that `as_data` has converted."""
        shape, dtype, differentiable = data
        return Value(tuple(shape), getattr(torch, dtype), differentiable)


Message = tuple[Value, ...]


def described(tensors: Sequence[Tensor]) -> Message:
    """Return the description of these tensors."""
    return tuple(Value(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)


def gradients_of(message: Message) -> Message:
    """Return the message that sends back the gradients of a message: one for each differentiable value."""
    return tuple(value for value in message if value.differentiable)


def size_of(message: Message) -> int:
    """Return the bytes of memory that a message needs. Each value starts at a multiple of 256 bytes."""
    return sum(_aligned(value.nbytes) for value in message)


def place(message: Message, view: Callable[[int, tuple[int, ...], torch.dtype], Tensor]) -> list[Tensor]:
    """Return the tensors of a message, one after the other in some memory.

    ``view(offset, shape, dtype)`` returns the part of this memory that starts at ``offset`` bytes.
    """
    tensors, offset = [], 0
    for value in message:
        tensors.append(view(offset, value.shape, value.dtype))
        offset += _aligned(value.nbytes)
    return tensors


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
