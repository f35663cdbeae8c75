"""A plain collective with one matmul: the equivalent without this package, and the time to beat.

The collective library gets the best conditions: a contiguous gather dimension, and preallocated buffers and outputs. A
second row allocates on every call, as programs do. Two more rows use the matmul of this package. Reduce-scatter has
another row with an all-to-all, in which gloo moves less data.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.methods.method import Method, Multiply, Prepared, multiply_of_ours, pair, single, torch_mm
from symm_overlap._torch import all_gather_single, reduce_scatter_single


def _preallocated(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor, multiply: Multiply = torch_mm) -> Prepared:
    group = rank.group
    output = a.new_empty(case.out_shape)
    if case.gathers:
        gathered = a.new_empty(case.m, case.k)

        def gather() -> tuple[torch.Tensor, torch.Tensor]:
            all_gather_single(gathered, a, group=group)
            multiply(gathered, b, output)
            return output, gathered

        return Prepared(gather, pair, poison=lambda: _fill(output, gathered))
    if case.op == "matmul_reduce_scatter":
        partial = a.new_empty(case.m, case.n)

        def scatter() -> torch.Tensor:
            multiply(a, b, partial)
            reduce_scatter_single(output, partial, group=group)
            return output

        return Prepared(scatter, single, poison=lambda: _fill(output, partial))

    def reduce() -> torch.Tensor:
        multiply(a, b, output)
        dist.all_reduce(output, group=group)
        return output

    return Prepared(reduce, single, poison=lambda: _fill(output))


def _preallocated_of_ours(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """The plain collective with the matmul of ours, so that only communication differs from ours."""
    return _preallocated(rank, case, a, b, multiply_of_ours(rank, case))


def _allocating_of_ours(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    return _allocating(rank, case, a, b, multiply_of_ours(rank, case))


def _allocating(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor, multiply: Multiply = torch_mm) -> Prepared:
    group = rank.group

    def matmul(left: torch.Tensor) -> torch.Tensor:
        product = left.new_empty(left.shape[0], case.n)
        multiply(left, b, product)
        return product

    if case.gathers:

        def gather() -> tuple[torch.Tensor, torch.Tensor]:
            gathered = a.new_empty(case.m, case.k)
            all_gather_single(gathered, a, group=group)
            return matmul(gathered), gathered

        return Prepared(gather, pair)
    if case.op == "matmul_reduce_scatter":

        def scatter() -> torch.Tensor:
            output = a.new_empty(case.out_shape)
            reduce_scatter_single(output, matmul(a), group=group)
            return output

        return Prepared(scatter, single)

    def reduce() -> torch.Tensor:
        output = matmul(a)
        dist.all_reduce(output, group=group)
        return output

    return Prepared(reduce, single)


def _all_to_all(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    group = rank.group
    output = a.new_empty(case.out_shape)
    partial, received = a.new_empty(case.m, case.n), a.new_empty(case.m, case.n)
    pieces = received.view(case.world, case.rows, case.n)

    def scatter() -> torch.Tensor:
        dist.all_to_all_single(received, torch.mm(a, b, out=partial), group=group)
        return torch.sum(pieces, 0, out=output)

    return Prepared(scatter, single, poison=lambda: _fill(output, partial, received))


def _fill(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


METHODS = (
    Method("plain", "plain collective + matmul", _preallocated, plain=True),
    Method("plain_of_ours", "plain, with the matmul of ours", _preallocated_of_ours, plain=True),
    Method("plain_allocating", "plain, allocating each call", _allocating, plain=True),
    Method("plain_allocating_of_ours", "plain, allocating, matmul of ours", _allocating_of_ours, plain=True),
    Method("plain_all_to_all", "matmul + all-to-all + sum", _all_to_all, ("matmul_reduce_scatter",), plain=True),
)
