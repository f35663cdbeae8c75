"""Calls of every op, with arguments that cover all the ways in which the steps compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import symm_overlap
from tests.collective.scaled_cases import E4M3, ONE, rows_can_be_scaled

ops = torch.ops.symm_overlap

Calls = dict[str, Callable[[], Any]]


class Made(NamedTuple):
    """Creates tensors of random numbers. They are the same in every run, and different on every rank."""

    generator: torch.Generator
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)


def all_calls(group: ProcessGroup, rank: int, dtype: torch.dtype = torch.float64) -> Calls:
    """Return the calls by a short description. ``dtype`` does not apply to float8 calls."""
    of = Made(torch.Generator().manual_seed(rank), dtype)
    return {**gathers(group, group.size(), of), **sums(group, group.size(), of), **scaled(group, group.size(), of)}


def gathers(group: ProcessGroup, world: int, of: Made) -> Calls:
    A, B, C, wide = of(2, 12, 6), of(6, 10), of(10, 6).t(), of(world * 6, 10)
    weight_shard, X = of(6, 4), of(2, 3 + group.rank(), 24 * world)
    calls: Calls = {
        **{f"all_gather {dim}": lambda dim=dim: symm_overlap.all_gather(A, dim, group) for dim in range(3)},
        "all_gather, one column": lambda: symm_overlap.all_gather(A[:, :, :1], 2, group),
        **{f"matmul {dim}": lambda dim=dim: symm_overlap.all_gather_matmul(A, [B, C], dim, group) for dim in range(2)},
        "matmul, nothing kept": lambda: symm_overlap.all_gather_matmul(A, [B], 1, group, return_A=False),
        "matmul last": lambda: symm_overlap.all_gather_matmul(A, [wide], 2, group),
        "matmul last, nothing kept": lambda: symm_overlap.all_gather_matmul(A, [wide], 2, group, return_A=False),
    }
    for dim in range(3):
        grad = of(*(size * (world if index == dim else 1) for index, size in enumerate((2, 12))), 5)
        calls[f"weight_grad {dim}"] = lambda dim=dim, grad=grad: ops.all_gather_weight_grad(
            A, [grad, grad + 1], dim, group.group_name
        )
    for dim, transpose in ((0, True), (0, False), (1, True), (1, False)):
        contracted = weight_shard.shape[1 if transpose else 0] * (world if dim == transpose else 1)
        calls[f"weight {dim} {transpose}"] = lambda dim=dim, transpose=transpose, contracted=contracted: (
            symm_overlap.all_gather_weight_matmul(X[:, :, :contracted], weight_shard, dim, group, transpose=transpose)
        )
    return calls


def sums(group: ProcessGroup, world: int, of: Made) -> Calls:
    name, tall, B, C = group.group_name, of(2 * world, 3 * world, 6), of(6, 4 * world), of(4 * world, 6).t()
    added, bias = of(2 * world, 3 * world, 4 * world), of(4 * world)
    X, G = of(5 + group.rank(), 2 * world), of(5 + group.rank(), 3 * world)
    calls: Calls = {
        "all_reduce": lambda: symm_overlap.all_reduce(tall, "sum", group),
        "matmul_all_reduce": lambda: symm_overlap.matmul_all_reduce(tall, B, "avg", group),
        "matmul_all_reduce, bias": lambda: symm_overlap.matmul_all_reduce(tall, B, "sum", group, bias),
        **{
            f"matmuls_all_reduce, addend {addend is not None}": lambda addend=addend: ops.fused_matmuls_all_reduce(
                [tall, tall + 1], [B, C], addend, "sum", name, [of(0), bias]
            )
            for addend in (None, added)
        },
    }
    for dim in range(3):
        calls |= {
            f"reduce_scatter {dim}": lambda dim=dim: symm_overlap.reduce_scatter(added, "sum", dim, group),
            f"matmul {dim}": lambda dim=dim: symm_overlap.matmul_reduce_scatter(tall, B, "avg", dim, group),
        }
        # (factors of the products, addend, indices of the products to keep, whether to keep the sum)
        for factors, addend, keep, keep_sum in (
            ([B, C], None, (), False),
            ([B], added, (), False),
            ([B], None, (0,), False),
            ([B], added, (), True),
            ([B, C, B], added, (2, 0), True),
        ):
            more = {"keep": keep, "keep_sum": keep_sum} if keep or keep_sum else {}
            op = ops.fused_matmuls_reduce_scatter_keep if more else ops.fused_matmuls_reduce_scatter
            given = [tall + index for index in range(len(factors))], factors, addend
            calls[f"{len(factors)} products, addend {addend is not None}, {more} {dim}"] = (
                lambda op=op, given=given, more=more, dim=dim: op(*given, "sum", dim, name, **more)
            )
    for dim in range(2):
        calls[f"weight_grad_reduce_scatter {dim}"] = lambda dim=dim: ops.weight_grad_reduce_scatter(
            X, G, "sum", dim, name
        )
    return calls


def scaled(group: ProcessGroup, world: int, of: Made) -> Calls:
    name, calls = group.group_name, {}
    A, B = of(2 * world, 3 * world, 16).to(E4M3), of(16 * world, 16).to(E4M3).t()
    added, bias = of(2 * world, 3 * world, 16 * world).bfloat16(), of(16 * world).bfloat16()
    of_rows, of_columns = of(2 * world, 3 * world, 1).float().exp(), of(1, 16 * world).float().exp()
    scales = {"numbers": (ONE, ONE / 2), **({"rows": (of_rows, of_columns)} if rows_can_be_scaled() else {})}
    lists = [[A] * 2, [B, B.clone()]], [[None, bias], [None] * 2, added]
    for kind, (of_A, of_B) in scales.items():
        pair = [of_A] * 2, [of_B] * 2
        for dim in range(3):
            calls |= {
                f"scaled {kind} {dim}": lambda dim=dim, of_A=of_A, of_B=of_B: symm_overlap.scaled_matmul_reduce_scatter(
                    A, B, of_A, of_B, "avg", dim, group, bias=bias
                ),
                f"scaled sum {kind} {dim}": lambda dim=dim, pair=pair: ops.fused_scaled_matmuls_reduce_scatter(
                    *lists[0], *pair, *lists[1], "sum", dim, name, torch.bfloat16, [False] * 2
                ),
                f"scaled kept {kind} {dim}": lambda dim=dim, pair=pair: ops.fused_scaled_matmuls_reduce_scatter_keep(
                    *lists[0], *pair, *lists[1], "sum", dim, name, torch.bfloat16, [False] * 2, keep=[1], keep_sum=True
                ),
            }
        for dim in range(2):
            calls[f"scaled gather {kind} {dim}"] = lambda dim=dim, of_A=of_A, of_B=of_B: (
                symm_overlap.all_gather_scaled_matmul(A, [B, B], of_A, [of_B] * 2, dim, group, biases=[None, bias])
            )
    return calls
