"""Count the FLOPs of layers in a forward, on fake tensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .kept_fakes import FunctionCaches
from .skeleton import Skeleton
from .trace.calls import Call
from .trace.tracer import Traced


def flops_of_calls(traced: Traced, skeleton: Skeleton) -> list[float] | None:
    """Return the FLOPs of every call of a layer or of a module beside the layers.

    Return None, and warn, if a module cannot run on fake tensors, for instance because torch has a kernel for an
    operator, but no rule for its shapes: it has none for grouped matmuls of float32.
    """
    try:
        with FunctionCaches():
            return [_flops(call, skeleton) for call in traced.calls.values()]
    except Exception as error:  # torch raises many kinds
        reason = str(error).strip().split("\n")[0]
        warnings.warn(
            "the FLOPs of the layers could not be counted on fake tensors, so their numbers of parameters determine "
            f"the partition. Pass costs= to PipelineModel to determine it yourself. The reason: {reason}",
            stacklevel=6,
        )
        return None


def _flops(call: Call, skeleton: Skeleton) -> float:
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    # Eager, since the compiler compiles nothing under a mode, and raises if it was asked for one graph.
    with skeleton.mode, counter, torch.compiler.set_stance("force_eager"):
        call.run([skeleton.fake(tensor) for tensor in call.inputs])
    return float(counter.get_total_flops())


def _grouped_matmul(a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of ``a @ b`` for every group: (M, K) or (groups, M, K), and (K, N) or (groups, K, N).

    A factor without a dimension for the groups is divided among them, so that together they multiply all of it once.
    """
    groups = a_shape[0] if len(a_shape) == len(b_shape) == 3 else 1
    return 2 * int(groups * a_shape[-2] * a_shape[-1] * b_shape[-1])


_UNCOUNTED = {torch.ops.aten._grouped_mm: _grouped_matmul}
"""Matmuls that torch's counter leaves out. Layers of experts consist of them."""
