"""Serve torch's own ``torch.ops.symm_mem.fused_*`` on CPU, so that programs written for them run there unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..._torch import SHAPES_OF_SYMM_MEM, below_autocast
from ..dispatch.registration import size_in_graph

_installed: list[torch.library.Library] = []


def install_as_symm_mem() -> None:
    """Register this package's CPU implementations as the CPU implementations of torch's fused ops, which have none.

    ``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, and their ``scaled`` variants
    for float8, then work on CPU tensors. CUDA tensors still use torch's own kernels. A second call does nothing.
    """
    if _installed:
        return
    library = torch.library.Library("symm_mem", "IMPL")
    for name in SHAPES_OF_SYMM_MEM:
        kernel = getattr(torch.ops.symm_overlap, name).default
        library.impl(name, _without_autocast(kernel), "CPU")
        library.impl(name, _with_size_in_graph(name), "Meta", allow_override=True)
    _installed.append(library)


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` without autocast: like torch's own ops, it then keeps the dtype of its inputs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            return kernel(*args, **kwargs)

    return run


def _with_size_in_graph(name: str) -> Callable[..., Any]:
    """Return torch's shape function of the op, extended so that it also adds the group's size to the keys of compiled
    graphs.

    See `size_in_graph`.
    """
    shapes = SHAPES_OF_SYMM_MEM[name]
    schema = getattr(torch.ops.symm_mem, name).default._schema
    at = [argument.name for argument in schema.arguments].index("group_name")

    @wraps(shapes)
    def run(*args: Any, **kwargs: Any) -> Any:
        size_in_graph(kwargs["group_name"] if "group_name" in kwargs else args[at])
        return shapes(*args, **kwargs)

    return run
