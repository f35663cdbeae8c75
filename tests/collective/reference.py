"""Expected results of the ops: those of torch's own fallbacks on gloo, and of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tests.ranks import Rank

SHAPE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Allowed relative error of each dtype, compared with float64."""


def binary(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random zeros and ones. Every dtype holds their sums of products exactly, so one wrong chunk is visible."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)


def normal(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random numbers with unit variance."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor, both in float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def same(found: Tensor, expected: Tensor) -> None:
    """Assert that both tensors have the same sizes, strides and values."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.stride() == expected.stride(), (found.shape, found.stride(), expected.stride())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def torch_all_gather_matmul(A: Tensor, Bs: Sequence[Tensor], dim: int, me: Rank) -> tuple[Tensor, list[Tensor]]:
    """Call torch's fallback for its own op of this name."""
    gathered, outputs = symm_mem._fused_all_gather_matmul_fallback(A, list(Bs), dim, me.group.group_name)
    assert gathered is not None
    return gathered, outputs


def torch_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, dim: int, me: Rank) -> Tensor:
    """Call torch's fallback for its own op of this name."""
    return symm_mem._fused_matmul_reduce_scatter_fallback(A, B, reduce_op, dim, me.group.group_name)


def torch_all_reduce(X: Tensor, reduce_op: str, me: Rank) -> Tensor:
    """Call torch's functional all-reduce."""
    return funcol.wait_tensor(funcol.all_reduce(X, reduce_op, me.group.group_name))
