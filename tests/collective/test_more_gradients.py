"""Gradients of the ops used in backward passes, in cases that the gradients of the public ops do not reach."""

from __future__ import annotations

import pytest
import torch

from symm_overlap.collective.ops.product import product_of_rows
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap


@pytest.mark.parametrize("dim", range(4))
def test_the_product_of_rows_sums_over_every_dimension_but_the_last(dim: int) -> None:
    A = ref.binary((2, 3, 4, 5), torch.float64, seed=1)
    G = ref.binary((2, 3, 4, 6), torch.float64, seed=2)
    if dim == 3:  # the contracted dimension is the one that is gathered
        dim = A.dim() - 1
    assert torch.equal(product_of_rows(A, G, dim), torch.einsum("abck,abcn->kn", A, G))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_product_of_backward_passes_is_differentiable(dtype: torch.dtype) -> None:
    """`product` calls this op for the dtypes in which the back end multiplies itself."""
    inputs = [ref.binary(shape, dtype, seed=seed) for seed, shape in enumerate([(3, 5), (5, 4), (4,)])]
    grad = ref.binary((3, 4), dtype, seed=9)
    results = []
    for multiply in (ops._product, lambda a, b, bias: torch.addmm(bias, a, b)):
        given = [each.clone().requires_grad_() for each in inputs]
        results.append(torch.autograd.grad(multiply(*given), given, grad))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def scattered_addend(me: Rank, dim: int, reduce_op: str) -> None:
    shape = [3, 2]
    shape[dim] *= me.world
    X = ref.binary(shape, torch.float64, seed=me.rank).requires_grad_()
    Y = ops.fused_matmuls_reduce_scatter([], [], X, reduce_op, dim, me.group_name)
    cotangents = [ref.binary((3, 2), torch.float64, seed=10 + rank) for rank in range(me.world)]
    (found,) = torch.autograd.grad(Y, X, cotangents[me.rank])
    expected = torch.cat(cotangents, dim) / (me.world if reduce_op == "avg" else 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_of_an_addend_alone_has_the_gradient_of_a_reduce_scatter(ranks: Pool, dim: int, reduce_op: str) -> None:
    ranks.run(2, scattered_addend, dim, reduce_op)


def products_with_addend(me: Rank, dim: int, reduce_op: str) -> None:
    """Compare gradients with plain PyTorch on the inputs of all ranks at once."""
    shape, columns = [4, 3], 2 * (me.world if dim == 1 else 1)
    if dim == 0:
        shape[0] *= me.world
    product = [shape[0], columns]

    def inputs(rank: int) -> list[torch.Tensor]:
        shapes = [shape, shape, [3, columns], [3, columns], product]
        return [ref.normal(each, torch.float64, seed=10 * rank + i).requires_grad_() for i, each in enumerate(shapes)]

    everyone = [inputs(rank) for rank in range(me.world)]
    mine = everyone[me.rank]
    Y = ops.fused_matmuls_reduce_scatter(mine[:2], mine[2:4], mine[4], reduce_op, dim, me.group_name)
    grads = torch.autograd.grad(Y.square().sum(), mine)
    total = sum(A1 @ B1 + A2 @ B2 + extra for A1, A2, B1, B2, extra in everyone)
    total = total / (me.world if reduce_op == "avg" else 1)
    expected = torch.autograd.grad(total.square().sum(), mine)
    for found, wanted in zip(grads, expected, strict=True):
        assert ref.relative_error(found, wanted) < 1e-12


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_of_products_and_an_addend_has_the_gradients_of_plain_pytorch(
    ranks: Pool, dim: int, reduce_op: str
) -> None:
    ranks.run(2, products_with_addend, dim, reduce_op)
