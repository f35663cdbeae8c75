"""What the tensors of one message are, and how they lie in memory that carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan.layout import ALIGNMENT


class Value(NamedTuple):
    """One tensor that a stage hands to the next.

    Attributes:
        shape, dtype: of the tensor. It arrives contiguous, whatever its strides were.
        differentiable: whether it required gradients where it was made. Then its gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{tuple(self.shape)} of {self.dtype}"

    def as_data(self) -> list[Any]:
        """The value as JSON can hold it."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.differentiable]

    @staticmethod
    def from_data(data: Sequence[Any]) -> Value:
        """The value that `as_data` wrote."""
        shape, dtype, differentiable = data
        return Value(tuple(shape), getattr(torch, dtype), differentiable)


Message = tuple[Value, ...]


def described(tensors: Sequence[Tensor]) -> Message:
    """What these tensors are."""
    return tuple(Value(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)


def gradients_of(message: Message) -> Message:
    """The message that brings back the gradients of another one's values, of those that have any."""
    return tuple(value for value in message if value.differentiable)


def size_of(message: Message) -> int:
    """Bytes of memory that the message takes, each value from a multiple of 256 bytes on."""
    return sum(_aligned(value.nbytes) for value in message)


def place(message: Message, view: Callable[[int, tuple[int, ...], torch.dtype], Tensor]) -> list[Tensor]:
    """The tensors of a message, one behind the other in memory of which ``view(offset, shape, dtype)`` is a part."""
    tensors, offset = [], 0
    for value in message:
        tensors.append(view(offset, value.shape, value.dtype))
        offset += _aligned(value.nbytes)
    return tensors


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
