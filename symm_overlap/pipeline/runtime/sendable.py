"""What a stage may pass to the next one: strided tensors on the device of the messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def sendable(index: int, output: Any, device: torch.device) -> list[Tensor]:
    """Return the tensors that a stage passes to the next one.

    Raises:
        TypeError: a value is not a tensor, is a DTensor, is not strided, or is on another device.
    """
    values = list(output) if isinstance(output, (tuple, list)) else [output]
    for value in values:
        if isinstance(value, DTensor):
            raise TypeError(
                f"stage {index} returned a DTensor, whose mesh the next stage's ranks do not have: return its "
                "to_local(), and create a DTensor from it in the next stage"
            )
        if not isinstance(value, Tensor):
            raise TypeError(
                f"stage {index} returned {short(value)}: a stage before the last one must return a tensor or a tuple "
                "of tensors"
            )
        if value.layout != torch.strided:
            raise TypeError(
                f"stage {index} returned a tensor with the layout {value.layout}, which cannot be sent: return a "
                "strided tensor"
            )
        if value.device != device:
            raise TypeError(
                f"stage {index} returned a tensor on {value.device}, but the pipeline's messages are on {device}"
            )
    return values


def apart(tensors: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
    """Return the tensors that a stage passes on, detached, as the stage's module has returned them now.

    The next stage gets them later, and if it is on the same rank, it gets them without being sent. So what shares
    memory with a buffer of the module, which the next microbatch may write to, or with an earlier one of the tensors,
    which the next stage may write to, is copied. Other ranks receive separate copies too.
    """
    kept: set[int] | None = None
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        memory = _memory(tensor)
        shared = memory != 0 and memory in seen
        if not shared and not tensor.requires_grad:  # the value of a buffer has no gradient
            if kept is None:
                kept = {_memory(buffer) for buffer in module.buffers()}
            shared = memory != 0 and memory in kept
        seen.add(memory)
        found.append(tensor.detach().clone() if shared else tensor.detach())
    return found


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if it has none of its own."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def short(value: Any) -> str:
    """Return a value as text for a message, in at most a line."""
    if isinstance(value, Tensor):
        return f"a{' complex' * value.is_complex()} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
