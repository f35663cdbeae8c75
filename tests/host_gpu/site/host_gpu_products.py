"""Scaled products of float8, computed in float64 with the rules of GPUs. CPUs support fewer of them than GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from host_gpu_streams import Place, enqueue
from torch import Tensor

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_RESULTS = {
    frozenset((_E4M3,)): (*_FLOATS, _E4M3),
    frozenset((_E4M3, _E5M2)): (*_FLOATS, _E4M3, _E5M2),
    frozenset((_E5M2,)): (),
}
"""The dtypes of results for the dtypes of the factors, from NVIDIA's documentation of cublasLtMatmul."""


def scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    scale_result: Tensor | None,
    out: Tensor,
) -> None:
    """Compute ``out = a @ b`` with scales. A float8 result is multiplied by its own scale and is never infinite."""
    product = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    if bias is not None:
        product += bias.double()
    if out.dtype.itemsize == 1:
        if scale_result is not None:
            product *= scale_result.double()
        most = torch.finfo(out.dtype).max
        product.clamp_(-most, most)
    out.copy_(product.float())


def scaled_mm_out(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: Tensor,
) -> Tensor:
    """Replace ``_scaled_mm.out``. The arguments must meet the same requirements as for cuBLAS.

    As in torch, most of the requirements are checked only if there is something to multiply.
    """
    if self.shape[1] % 16 or mat2.shape[1] % 16:
        raise RuntimeError("_scaled_mm: k and n must be multiples of 16")
    out.resize_(self.shape[0], mat2.shape[1])
    if out.numel() == 0:
        return out
    if self.stride(1) != 1 or mat2.stride(0) != 1:
        raise RuntimeError("_scaled_mm: rows of a and columns of b must be contiguous")
    if out.dtype not in _RESULTS[frozenset((self.dtype, mat2.dtype))]:
        raise RuntimeError(f"_scaled_mm: no product of {self.dtype} and {mat2.dtype} in {out.dtype}")
    given = [None if x is None else Place(x) for x in (self, mat2, scale_a, scale_b, bias, scale_result, out)]

    def work() -> None:
        with torch._C._AutoDispatchBelowAutograd():
            scaled_product(*(None if place is None else place.tensor() for place in given))

    enqueue(work)
    return out


def scaled_mm(self: Tensor, mat2: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Replace ``_scaled_mm``."""
    given = [*arguments, *[None] * (5 - len(arguments))]
    dtype = named.get("out_dtype", given[4]) or self.dtype
    out = torch.empty(self.shape[0], mat2.shape[1], dtype=dtype, device=self.device)
    return scaled_mm_out(self, mat2, *arguments, **named, out=out)


SCALED: dict[str, Callable[..., Tensor]] = {"_scaled_mm": scaled_mm, "_scaled_mm.out": scaled_mm_out}
