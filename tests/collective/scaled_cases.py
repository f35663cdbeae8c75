"""Helpers for tests of scaled matmuls: float8 numbers and scales with which every product is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Rank

ops = torch.ops.symm_overlap
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K = 32
ONE = torch.tensor(1.0)

# A path, and how many chunks and streams it has.
WAYS: list[tuple[Any, ...]] = [
    ("sequential", None, None),
    ("pipelined", 1, 1),
    ("pipelined", 3, 2),
    ("c10d", 2, None),
    ("c10d", None, None),
]


def float8(*shape: int, seed: int = 0, dtype: torch.dtype = E4M3) -> Tensor:
    return ref.binary(shape, torch.float32, seed).to(dtype)


def weight(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = E4M3) -> Tensor:
    """Return a column-major matrix, as GPUs require."""
    return float8(columns, rows, seed=seed, dtype=dtype).t()


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a float8 tensor, because torch cannot compare float8. Return other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in (E4M3, E5M2) else tensor


def way(path: str, chunks: int | None, streams: int | None) -> Any:
    return symm_overlap.force_path(path, chunks=chunks, streams=streams)


def powers_of_two(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random powers of two. As scales, they keep every product exact."""
    return 2.0 ** torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def rows_can_be_scaled() -> bool:
    """True if torch._scaled_mm of this torch accepts a scale for each row on CPU."""
    try:
        torch._scaled_mm(float8(16, 16), weight(16, 16), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_row_scales = pytest.mark.skipif(
    not rows_can_be_scaled(), reason="in this torch, torch._scaled_mm on CPU accepts only one scale per tensor"
)


def all_ops(me: Rank, dim: int, lead: tuple[int, int], per_row: bool) -> None:
    """Call every op with and without its optional outputs. The gather has two weights."""
    world, contracted, columns = me.world, K, 3

    def scale(*shape: int) -> Tensor:
        return torch.ones(shape if per_row else ())

    if dim == 2:
        contracted, columns = world * K, world * 3
    A, Bs, B_scales = float8(*lead, K), [weight(contracted, 3), weight(contracted, 2)], [scale(1, 3), scale(1, 2)]
    for keep in (True, False):
        symm_overlap.all_gather_scaled_matmul(A, Bs, scale(*lead, 1), B_scales, dim, me.group, return_A=keep)
    rows = [size * (world if index == dim else 1) for index, size in enumerate(lead)]
    A, B, added = float8(*rows, K), weight(K, columns), torch.ones(*rows, columns).bfloat16()
    scales, options = (scale(*rows, 1), scale(1, columns)), {"out_dtype": torch.bfloat16}
    for keep in (False, True):
        scatter(keep)(A, B, *scales, "avg", dim, dim, me.group_name, None, **options)
    lists = ([A, A], [B, B], *([each] * 2 for each in scales), [None] * 2, [None] * 2)
    rest = ("sum", dim, me.group_name, torch.bfloat16, [False] * 2)
    ops.fused_scaled_matmuls_reduce_scatter(*lists, None, *rest)
    for addend, keep, keep_sum in [(None, [1], False), (added, [], True), (added, [1, 0], True)]:
        ops.fused_scaled_matmuls_reduce_scatter_keep(*lists, addend, *rest, keep=keep, keep_sum=keep_sum)


def scaled_mm(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None,
    out: torch.dtype,
    result_scale: Tensor | None = None,
) -> Tensor:
    """Call ``torch._scaled_mm`` on a tensor with any number of dimensions."""
    rows = (A_scale.flatten(0, -2) if A_scale.numel() > 1 else A_scale).contiguous()
    product: Tensor = torch._scaled_mm(A.flatten(0, -2).contiguous(), B, rows, B_scale, bias, result_scale, out)
    return product.view(*A.shape[:-1], B.shape[1])


def scatter(keep: bool) -> Callable[..., list[Tensor]]:
    """Return the op as a function that returns a list: this rank's part and, with ``keep``, also its product."""
    if not keep:
        return lambda *args, **kwargs: [ops.fused_scaled_matmul_reduce_scatter(*args, **kwargs)]

    def kept(
        A: Tensor,
        B: Tensor,
        A_scale: Tensor,
        B_scale: Tensor,
        reduce_op: str,
        dim: int,
        _: int,
        name: str,
        shape: list[int] | None,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype,
    ) -> list[Tensor]:
        if shape is not None:
            A = A.reshape(*shape[:-1], A.shape[-1])
            A_scale = A_scale.reshape(*shape[:-1], 1) if A_scale.dim() else A_scale
        lists = ([A], [B], [A_scale], [B_scale], [bias], [None])
        part, (product,), _total = ops.fused_scaled_matmuls_reduce_scatter_keep(
            *lists, None, reduce_op, dim, name, out_dtype, [False], keep=[0]
        )
        return [part, product]

    return kept
