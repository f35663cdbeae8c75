"""More cases like those of `tests.collective.gradient_cases`: any number of weights, sums that keep nothing, float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import symm_overlap
from tests.collective.gradient_cases import AllReduce, Case, Gather, Inputs, KeptScatter, Scatter, Sizes
from tests.collective.scaled_cases import E4M3
from tests.ranks import Rank


class Gathers(Gather):
    """An all-gather-matmul with any number of weights, all with a bias. ``widths`` contains the columns of each."""

    def __init__(self, dim: int, sizes: Sizes, widths: tuple[int, ...], **options: Any) -> None:
        super().__init__(dim, "sum", sizes, **options)
        self.widths = widths

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        shard, (rows, _), *_ = super().shapes(rank, world)
        return [shard, *((rows, columns) for columns in self.widths), *((columns,) for columns in self.widths)]

    def parts(self, inputs: Inputs) -> tuple[Inputs, list[Tensor | None]]:
        return inputs[1 : 1 + len(self.widths)], [*inputs[1 + len(self.widths) :]]


class Sums(KeptScatter):
    """The op `fused_matmuls_reduce_scatter`, which keeps no tensors."""

    def __init__(self, dim: int, reduce_op: str, sizes: Sizes) -> None:
        super().__init__(dim, reduce_op, sizes, keep=[], keep_sum=False)

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        As, Bs, biases, addend = inputs[:2], inputs[2:4], inputs[4:6], inputs[6]
        op = torch.ops.symm_overlap.fused_matmuls_reduce_scatter
        return [op(As, Bs, addend, self.reduce_op, self.dim, me.group_name, biases)]


class AllReduceNoBias(AllReduce):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        return super().shapes(rank, world)[:2]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        return [symm_overlap.matmul_all_reduce(*inputs, self.reduce_op, me.group)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        none = [[*inputs, inputs[0].new_zeros(inputs[1].shape[1])] for inputs in all_inputs]
        return super().plain(none)


class Scaled(Case):
    """A float8 case with A, a weight, their scales, and a bias. The output is in bfloat16.

    Args:
        by_row: whether there is a scale for each row and column. Otherwise each tensor has one scale.
    """

    dtypes = (E4M3, E4M3, torch.float32, torch.float32, torch.bfloat16)

    def __init__(self, dim: int, sizes: Sizes, by_row: bool) -> None:
        super().__init__(dim, "sum", sizes, by_row=by_row)

    def with_scales(self, A: tuple[int, ...], B: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of all inputs."""
        scales: list[tuple[int, ...]] = [(*A[:-1], 1), (1, B[1])] if self.options["by_row"] else [(), ()]
        return [A, B, *scales, (B[1],)]

    @staticmethod
    def product(A: Tensor, inputs: Inputs, A_scale: Tensor) -> Tensor:
        _, B, _, B_scale, bias = inputs
        return (A @ B) * A_scale * B_scale + bias


class ScaledGather(Scaled):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        lead, inner, columns = self.sizes
        return self.with_scales((*lead, inner), (inner * (world if self.dim == len(lead) else 1), columns))

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        A, B, A_scale, B_scale, bias = inputs
        gathered, products = symm_overlap.all_gather_scaled_matmul(
            A, [B], A_scale, [B_scale], self.dim, me.group, biases=[bias], out_dtype=torch.bfloat16
        )
        assert gathered is not None
        return [gathered, *products]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        A = torch.cat([inputs[0] for inputs in all_inputs], self.dim)
        scales = [inputs[2] for inputs in all_inputs]
        A_scale = torch.cat(scales, self.dim) if self.options["by_row"] else None
        return [[A, self.product(A, inputs, inputs[2] if A_scale is None else A_scale)] for inputs in all_inputs]


class ScaledScatter(Scaled):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        A, B, _ = Scatter(self.dim, "sum", self.sizes).shapes(rank, world)
        return self.with_scales(A, B)

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        A, B, A_scale, B_scale, bias = inputs
        return [
            symm_overlap.scaled_matmul_reduce_scatter(
                A, B, A_scale, B_scale, "sum", self.dim, me.group, bias=bias, out_dtype=torch.bfloat16
            )
        ]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(self.product(inputs[0], inputs, inputs[2]) for inputs in all_inputs)
        assert isinstance(total, Tensor)
        return [[part] for part in total.chunk(len(all_inputs), self.dim)]
