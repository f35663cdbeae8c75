"""A backend for CPUs that multiplies float32 in float64, so that every product is rounded only once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symm_overlap.runtime.cpu.backend import CpuBackend


class ExactCpuBackend(CpuBackend):
    """See `symm_overlap.runtime.backend.Backend`. All other members are those of the CPU backend."""

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None) -> None:
        """See `Backend.multiply`."""
        product = a.double() @ b.double()
        if bias is not None:
            product += bias
        out.copy_(product + out if add else product)

    def multiply_shards(
        self,
        shards: Sequence[Tensor],
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        products: Sequence[Tensor],
    ) -> None:
        """See `Backend.multiply_shards`."""
        for B, bias, product in zip(Bs, biases, products, strict=True):
            for shard, rows in zip(shards, product.chunk(len(shards)), strict=True):
                self.multiply(shard, B, rows, bias=bias)

    def calls_torch(self, dtype: torch.dtype) -> bool:
        """Return False: no matmul of this backend is torch's own."""
        return False
