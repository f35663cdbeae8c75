"""The launch code that all fused kernels share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configuration import INTERPRETER, Configuration, programs
from .factor import Factor, layout
from .flags import Flags
from .place import Machine

_POLLS_PER_SECOND = 1_000_000
"""More polls than the interpreter can do. It has no clock, and a wait must not end before its deadline."""

_PATIENCE = 0.02
"""Seconds for which a kernel waits for another kernel in the interpreter, before it asks that kernel to give way."""

_interpreting = threading.Lock()
"""Lets one kernel run at a time: a running interpreter replaces parts of Triton's language for the whole process."""

_waits: list[Flags] = []
"""The flags that the kernel now in the interpreter may wait for."""


def launch(
    kernel: Any,
    machine: Machine,
    arguments: tuple[Any, ...],
    flags: Flags,
    configuration: Configuration,
    weight: Tensor,
    *,
    waits: bool,
    ahead: Callable[..., None] | None,
    **constexprs: Any,
) -> None:
    """Launch a persistent kernel on the current stream. In the interpreter, the kernel has ended when this returns.

    Args:
        arguments: the kernel's arguments, except the last one, its limit.
        weight: one of the weights that the kernel multiplies with. All of them have the same layout and dtype.
        waits: whether the kernel waits for flags. The interpreter may then run it again from its beginning.
        ahead: called with the kernel, its arguments and its options instead of a launch; see `_triton`.
        constexprs: further constexpr arguments of the kernel.
    """
    interpreted = machine.architecture == INTERPRETER
    limit = round(flags.seconds * (_POLLS_PER_SECOND if interpreted else 1_000_000_000))
    given = *arguments, max(1, min(limit, 2**62))
    options = {**compiler_options(configuration), **constants(configuration, weight, interpreted), **constexprs}
    if ahead is not None:
        ahead(kernel, *given, **options)
        return
    run = partial(kernel[(programs(machine.multiprocessors),)], *given, **options)
    if interpreted:
        _take_turns(run, [flags] if waits else [])
    else:
        run()


def _take_turns(run: Callable[[], None], flags: list[Flags]) -> None:
    """Run a kernel in the interpreter, and run it again if it has given way to another one.

    A kernel may wait for a call of a peer, and at that peer this call may come after the kernel of another lane. So a
    kernel that waits must not keep the interpreter from kernels of other lanes.
    """
    again = True
    while again:
        while not _interpreting.acquire(timeout=_PATIENCE):
            for others in list(_waits):
                others.interrupt()
        try:
            _waits.extend(flags)
            run()
        finally:
            _waits.clear()
            again = any(each.resume() for each in flags)
            _interpreting.release()
        if again:
            time.sleep(_PATIENCE)  # otherwise this thread would get the lock again before another one wakes up


def compiler_options(configuration: Configuration) -> dict[str, Any]:
    """Return the options of Triton's compiler."""
    return {
        "num_warps": configuration.warps,
        "num_stages": configuration.stages,
        # Triton 3.9 says that its default will change. The last bits of products with a scale and a bias would, too.
        "enable_fp_fusion": True,
    }


def constants(configuration: Configuration, weight: Tensor, interpreted: bool) -> dict[str, Any]:
    """Return the constants that the kernels are compiled for, besides those of their `epilogue`."""
    lie = layout(weight)
    return {
        "TILE_M": configuration.tile_m,
        "TILE_N": configuration.tile_n,
        "TILE_K": configuration.tile_k,
        "GROUP": configuration.group,
        "DESCRIPTORS": configuration.descriptors,
        "EVEN_K": weight.shape[0] % configuration.tile_k == 0,
        "TRANSPOSED": lie == "columns",
        "STRIDED": lie == "strided",
        "ACC": tl.float64 if weight.dtype == torch.float64 else tl.float32,
        # The default precision of float32 matmuls in torch.
        "PRECISION": "ieee",
        "CLOCK": not interpreted,
        "INTERPRETED": interpreted,
    }


def epilogue(factors: Sequence[Factor], row_scale: Tensor | None) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Return the arguments of `tiles.finish_tile` for similar factors, from ``row_scale`` on, and the constants."""
    scaled, biased = row_scale is not None, factors[0].bias is not None
    steps = [0 if factor.scale is None or factor.scale.numel() == 1 else 1 for factor in factors]
    arguments = (
        row_scale,
        0 if row_scale is None or row_scale.numel() == 1 else 1,
        tuple(factor.scale for factor in factors) if scaled else None,
        tuple(steps) if scaled else None,
        tuple(factor.bias for factor in factors) if biased else None,
    )
    return arguments, {"SCALED": scaled, "BIASED": biased, "FAST": factors[0].fast}


def strides(weights: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the strides along k and the strides along n of all weights."""
    return tuple(weight.stride(0) for weight in weights), tuple(weight.stride(1) for weight in weights)


def described(
    configuration: Configuration, matrices: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[TensorDescriptor]:
    """Return tensor descriptors of (rows, k) matrices with contiguous rows, and of weights (k, n) that share one
    layout.
    """
    tile_m, tile_n, tile_k = configuration.tile_m, configuration.tile_n, configuration.tile_k
    found = [TensorDescriptor.from_tensor(matrix, [tile_m, tile_k]) for matrix in matrices]
    if layout(weights[0]) != "columns":
        return [*found, *(TensorDescriptor.from_tensor(weight, [tile_k, tile_n]) for weight in weights)]
    # Of the transposes. The tensors themselves are the caller's, so that later launches can find them (`launchable`).
    return [*found, *(TensorDescriptor(w, w.shape[::-1], w.stride()[::-1], [tile_n, tile_k]) for w in weights)]
