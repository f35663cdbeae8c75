"""Launching a fused kernel: what is the same for all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configuration import INTERPRETER, Configuration, programs
from .flags import Flags
from .place import Machine

_POLLS_PER_SECOND = 1_000_000
"""More than the interpreter can make: it has no clock, and a wait must not end before its deadline."""

_interpreting = threading.Lock()
"""The interpreter replaces parts of Triton's language while it runs, for the whole process. What a kernel waits for is
done by threads that do not interpret, so with one call at a time a kernel that holds this lock can always end. Calls on
several lanes at once can keep it from each other until the deadline: in the interpreter they are not supported."""


def launch(
    kernel: Any,
    machine: Machine,
    arguments: tuple[Any, ...],
    flags: Flags,
    configuration: Configuration,
    dtype: torch.dtype,
    k: int,
    **constexprs: bool,
) -> None:
    """Launch a persistent kernel on the current stream. In the interpreter it has ended when this returns."""
    interpreted = machine.architecture == INTERPRETER
    limit = flags.seconds * (_POLLS_PER_SECOND if interpreted else 1_000_000_000)
    with _interpreting if interpreted else nullcontext():
        kernel[(programs(machine.multiprocessors),)](
            *arguments,
            flags.epoch,
            max(1, min(round(limit), 2**62)),
            num_warps=configuration.warps,
            num_stages=configuration.stages,
            **constants(configuration, dtype, k, interpreted),
            **constexprs,
        )


def constants(configuration: Configuration, dtype: torch.dtype, k: int, interpreted: bool) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {
        "TILE_M": configuration.tile_m,
        "TILE_N": configuration.tile_n,
        "TILE_K": configuration.tile_k,
        "GROUP": configuration.group,
        "DESCRIPTORS": configuration.descriptors,
        "EVEN_K": k % configuration.tile_k == 0,
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        # As torch multiplies float32 unless it is told otherwise.
        "PRECISION": "ieee",
        "CLOCK": not interpreted,
        "INTERPRETED": interpreted,
    }


def is_transposed(weight: Tensor) -> bool:
    """Whether a weight's columns lie together, as those of ``W.t()`` do, and not its rows."""
    return weight.stride(1) != 1


def described(configuration: Configuration, matrices: Sequence[Tensor], weight: Tensor) -> tuple[TensorDescriptor, ...]:
    """Tensor descriptors of (rows, k) matrices with contiguous rows, and of the weight, (k, n), in either layout."""
    tile_m, tile_n, tile_k = configuration.tile_m, configuration.tile_n, configuration.tile_k
    if is_transposed(weight):
        weight_descriptor = TensorDescriptor.from_tensor(weight.t(), [tile_n, tile_k])
    else:
        weight_descriptor = TensorDescriptor.from_tensor(weight, [tile_k, tile_n])
    return *(TensorDescriptor.from_tensor(matrix, [tile_m, tile_k]) for matrix in matrices), weight_descriptor
