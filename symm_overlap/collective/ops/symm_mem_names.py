"""Serve torch's own ``torch.ops.symm_mem.fused_*`` on CPU, so that programs written for them run there unchanged."""

from __future__ import annotations

import torch

from .._torch import symm_mem as _defines_the_ops  # noqa: F401
from .scaled_matmul import all_gather_scaled_matmul, scaled_matmul_reduce_scatter

_installed: list[torch.library.Library] = []


def install_as_symm_mem() -> None:
    """Register this package's CPU implementations as those of torch's ops, which have none.

    ``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, and their ``scaled`` variants
    for float8, then work on CPU tensors. CUDA tensors still get torch's own kernels. Calling it again does nothing.
    """
    if _installed:
        return
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", torch.ops.symm_overlap.fused_all_gather_matmul.default, "CPU")
    library.impl("fused_matmul_reduce_scatter", torch.ops.symm_overlap.fused_matmul_reduce_scatter.default, "CPU")
    library.impl("fused_all_gather_scaled_matmul", all_gather_scaled_matmul, "CPU")
    library.impl("fused_scaled_matmul_reduce_scatter", scaled_matmul_reduce_scatter, "CPU")
    _installed.append(library)
