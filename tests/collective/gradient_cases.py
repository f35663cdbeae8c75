"""Cases for tests of values and gradients, on CPU and on GPUs.

Each case has an op, its inputs on a rank, and the same computation for all ranks at once in plain PyTorch.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.ranks import Rank

Inputs = list[Tensor]
F64 = torch.float64


class Sizes(NamedTuple):
    """Sizes of a case: a shard's leading dimensions, the contracted dimension, and the columns of one rank."""

    lead: tuple[int, ...] = (2, 3)
    inner: int = 4
    columns: int = 5


SMALL = Sizes()


class Case:
    """An op, its inputs on a rank, and the same computation for all ranks at once in plain PyTorch."""

    def __init__(self, dim: int = 0, reduce_op: str = "sum", sizes: Sizes = SMALL, **options: Any) -> None:
        self.dim, self.reduce_op, self.sizes, self.options = dim, reduce_op, sizes, options

    def __str__(self) -> str:
        options = {"dim": self.dim, "reduce_op": self.reduce_op, **self.options}
        return " ".join([type(self).__name__, *(f"{name}={value}" for name, value in options.items())])

    def sized(self, lead: tuple[int, ...], inner: int, columns: int) -> Case:
        """Return the same case with other sizes. ``lead`` must have as many dimensions as before."""
        return type(self)(self.dim, self.reduce_op, Sizes(lead, inner, columns), **self.options)

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs of a rank."""
        raise NotImplementedError

    def inputs(self, rank: int, world: int) -> Inputs:
        """Return random inputs that require gradients."""
        return [
            ref.normal(shape, F64, seed=100 * rank + index).requires_grad_()
            for index, shape in enumerate(self.shapes(rank, world))
        ]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        raise NotImplementedError

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        """Compute the outputs of every rank from the inputs of every rank."""
        raise NotImplementedError


def whole(shape: tuple[int, ...], dim: int, world: int) -> tuple[int, ...]:
    """Return the shape of ``world`` shards that are concatenated along ``dim``."""
    return tuple(size * (world if index == dim else 1) for index, size in enumerate(shape))


class Gather(Case):
    """Two weights, of which the second has a bias."""

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        lead, inner, columns = self.sizes
        rows, fewer = inner * (world if self.dim == len(lead) else 1), -(-columns // 3)
        return [(*lead, inner), (rows, columns), (rows, fewer), (fewer,)]

    def parts(self, inputs: Inputs) -> tuple[Inputs, list[Tensor | None]]:
        """Return the weights and the biases among the inputs."""
        return inputs[1:3], [None, inputs[3]]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        Bs, biases = self.parts(inputs)
        A, outputs = symm_overlap.all_gather_matmul(inputs[0], Bs, self.dim, me.group, biases=biases, **self.options)
        return outputs if A is None else [A, *outputs]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        A = torch.cat([inputs[0] for inputs in all_inputs], self.dim)
        keep = [A] if self.options.get("return_A", True) else []
        return [
            [*keep, *(A @ B if bias is None else A @ B + bias for B, bias in zip(*self.parts(inputs), strict=True))]
            for inputs in all_inputs
        ]


class Scatter(Case):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        lead, inner, columns = self.sizes
        *rows, all_columns = whole((*lead, columns), self.dim, world)
        return [(*rows, inner), (inner, all_columns), (all_columns,)]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        A, B, bias = inputs
        return [symm_overlap.matmul_reduce_scatter(A, B, self.reduce_op, self.dim, me.group, bias)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(A @ B + bias for A, B, bias in all_inputs) / (len(all_inputs) if self.reduce_op == "avg" else 1)
        return [[part] for part in total.chunk(len(all_inputs), self.dim)]


class KeptScatter(Scatter):
    """Two products and an addend. The options say which of the products and sums the op also returns."""

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        A, B, bias = super().shapes(rank, world)
        return [A, A, B, B, bias, bias, (*A[:-1], B[1])]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        output, products, total = torch.ops.symm_overlap.fused_matmuls_reduce_scatter_keep(
            inputs[:2], inputs[2:4], inputs[6], self.reduce_op, self.dim, me.group_name, inputs[4:6], **self.options
        )
        return [output, *products, *([] if total is None else [total])]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        products = [
            [inputs[index] @ inputs[index + 2] + inputs[index + 4] for index in (0, 1)] for inputs in all_inputs
        ]
        totals = [sum(made) + inputs[6] for made, inputs in zip(products, all_inputs, strict=True)]
        sums = sum(totals) / (len(all_inputs) if self.reduce_op == "avg" else 1)
        return [
            [part, *(made[index] for index in self.options["keep"]), *([total] if self.options["keep_sum"] else [])]
            for part, made, total in zip(sums.chunk(len(all_inputs), self.dim), products, totals, strict=True)
        ]


class GatherWeight(Case):
    """The number of rows differs between ranks."""

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        (batch, rows), inner, columns = self.sizes
        weight = (columns, inner)
        contracted = whole(weight, self.dim, world)[1 if self.options["transpose"] else 0]
        return [(batch, max(rows - 2 + rank, 0), contracted), weight]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        return [symm_overlap.all_gather_weight_matmul(*inputs, self.dim, me.group, **self.options)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        weight = torch.cat([inputs[1] for inputs in all_inputs], self.dim)
        return [[inputs[0] @ (weight.t() if self.options["transpose"] else weight)] for inputs in all_inputs]


class ScatterWeightGrad(Case):
    """The number of rows differs between ranks."""

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        (batch, rows), inner, columns = self.sizes
        return [(batch, max(rows - 2 + rank, 0), size) for size in whole((columns, inner), self.dim, world)]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        return [
            torch.ops.symm_overlap.weight_grad_reduce_scatter(*inputs, self.reduce_op, self.dim, me.group.group_name)
        ]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(X.flatten(0, 1).t() @ G.flatten(0, 1) for X, G in all_inputs)
        total = total / (len(all_inputs) if self.reduce_op == "avg" else 1)
        return [[part] for part in total.chunk(len(all_inputs), self.dim)]


class AllReduce(Scatter):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        lead, inner, columns = self.sizes
        return [(*lead, inner), (inner, columns), (columns,)]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        A, B, bias = inputs
        return [symm_overlap.matmul_all_reduce(A, B, self.reduce_op, me.group, bias)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(A @ B + bias for A, B, bias in all_inputs) / (len(all_inputs) if self.reduce_op == "avg" else 1)
        return [[total] for _ in all_inputs]


class SumAllReduce(AllReduce):
    """Two products, of which the second has a bias, and an addend."""

    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        A, B, bias = super().shapes(rank, world)
        return [A, (*A[:-1], A[-1] + 1), B, (A[-1] + 1, B[1]), bias, (*A[:-1], B[1])]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        As, Bs, bias, addend = inputs[:2], inputs[2:4], inputs[4], inputs[5]
        biases = [bias.new_empty(0), bias]
        op = torch.ops.symm_overlap.fused_matmuls_all_reduce
        return [op(As, Bs, addend, self.reduce_op, me.group_name, biases)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(A1 @ B1 + A2 @ B2 + bias + addend for A1, A2, B1, B2, bias, addend in all_inputs)
        return [[total / (len(all_inputs) if self.reduce_op == "avg" else 1)] for _ in all_inputs]


class PlainGather(Case):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        return [(*self.sizes.lead, self.sizes.inner)]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        return [symm_overlap.all_gather(inputs[0], self.dim, me.group)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        return [[torch.cat([inputs[0] for inputs in all_inputs], self.dim)] for _ in all_inputs]


class PlainAllReduce(PlainGather):
    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        return [torch.ops.symm_overlap.all_reduce(inputs[0], self.reduce_op, me.group_name)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(inputs[0] for inputs in all_inputs) / (len(all_inputs) if self.reduce_op == "avg" else 1)
        return [[total] for _ in all_inputs]


class PlainScatter(Case):
    def shapes(self, rank: int, world: int) -> list[tuple[int, ...]]:
        return [whole((*self.sizes.lead, self.sizes.inner), self.dim, world)]

    def run(self, inputs: Inputs, me: Rank) -> Inputs:
        return [symm_overlap.reduce_scatter(inputs[0], self.reduce_op, self.dim, me.group)]

    def plain(self, all_inputs: list[Inputs]) -> list[Inputs]:
        total = sum(inputs[0] for inputs in all_inputs) / (len(all_inputs) if self.reduce_op == "avg" else 1)
        return [[part] for part in total.chunk(len(all_inputs), self.dim)]


DIMS = range(3)
GATHERS = [
    Gather(dim, return_A=return_A, save=save)
    for dim, (return_A, save) in itertools.product(
        DIMS, [(True, None), (False, None), (True, "shard"), (False, "gathered")]
    )
]
SUMS = [
    kind(dim, op)
    for kind, dims in (
        (Scatter, DIMS),
        (AllReduce, [0]),
        (SumAllReduce, [0]),
        (PlainScatter, DIMS),
        (PlainAllReduce, [0]),
    )
    for dim, op in itertools.product(dims, ("sum", "avg"))
]
KEPT = [
    KeptScatter(dim, ("sum", "avg")[dim % 2], keep=keep, keep_sum=keep_sum)
    for dim, keep, keep_sum in ((0, [1], False), (1, [], True), (2, [1, 0], True), (1, [0, 1], False))
]
WEIGHTS = [
    *(GatherWeight(dim, transpose=transpose) for dim in range(2) for transpose in (False, True)),
    ScatterWeightGrad(0, "avg"),
    ScatterWeightGrad(1, "sum"),
]
CASES: list[Case] = [*GATHERS, *SUMS, *KEPT, *WEIGHTS, *(PlainGather(dim) for dim in DIMS)]


def loss_of(outputs: Inputs, seed: int) -> Tensor:
    """Return a scalar loss. Each element of each output has its own weight in it. Elements are squared, so that second
    derivatives exist.
    """
    weighted = [(y.square() * ref.normal(y.shape, F64, seed=seed + i)).sum() for i, y in enumerate(outputs)]
    return torch.stack(weighted).sum()
