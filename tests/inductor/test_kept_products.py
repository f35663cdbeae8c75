"""Products that other ops also use, in compiled programs: changing sizes, code that Inductor generates, and modules
of which only the matmuls are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor, reduce_scatter_tensor_autograd
from torch.fx import Graph

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.inductor import models
from tests.inductor.scaled_cases import SCALES_OF_ROWS
from tests.inductor.test_compile import start_anew, without_cached_graphs
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.ranks import Pool, Rank
from tests.transforms import comparing

F64 = torch.float64


def tensors(me: Rank, rows: int) -> list[Tensor]:
    """Return an input, two weights and a bias."""
    generator = torch.Generator().manual_seed(me.rank)
    shapes = [(2, rows, 6), (6, 4), (6, 4), (4,)]
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]


def whole(x: Tensor, me: Rank) -> Tensor:
    """Return a tensor whose number of rows is known to be divisible by the world size, even if it is symbolic."""
    return torch.cat([x * (each + 1) for each in range(me.world)], 1).sin() * (1 + me.rank)


def product_with_bias(me: Rank) -> Callable[..., Any]:
    def run(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Any:
        x = whole(x, me)
        product = torch.addmm(bias, x.flatten(0, 1), one).view(*x.shape[:2], 4)
        return product.relu(), reduce_scatter_tensor(product, "sum", 1, me.group)

    return run


def one_of_two_products(me: Rank) -> Callable[..., Any]:
    def run(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Any:
        rows = whole(x, me).flatten(0, 1)
        kept = rows @ two
        return reduce_scatter_tensor(rows @ one + kept, "avg", 0, me.group), kept.sin()

    return run


def sum_of_two_products(me: Rank) -> Callable[..., Any]:
    def run(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Any:
        x = whole(x, me)
        total = x @ one + x @ two
        return total.cos(), reduce_scatter_tensor(total, "sum", 1, me.group)

    return run


def scaled_product(me: Rank) -> Callable[..., Any]:
    def run(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Any:
        x = whole(x, me)
        rows, columns, float8 = x.flatten(0, 1), torch.cat([one] * 4, 1).t().contiguous(), torch.float8_e4m3fn
        if SCALES_OF_ROWS:
            scales = (1 + x[..., :1].abs()).flatten(0, 1).float(), 1 + columns[:, 0].abs().view(1, -1).float()
        else:
            scales = x.abs().max().float(), bias.abs().max().float()
        product = torch._scaled_mm(rows.to(float8), columns.to(float8).t(), *scales, out_dtype=torch.float32)
        product = product.view(*x.shape[:2], 16)
        return product.relu(), reduce_scatter_tensor(product, "sum", 1, me.group)

    return run


def product_that_all_ranks_sum(me: Rank) -> Callable[..., Any]:
    def run(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Any:
        product = whole(x, me) @ one
        return all_reduce(product, "sum", me.group), product.tan()

    return run


PROGRAMS = {
    program.__name__: program
    for program in (
        product_with_bias,
        one_of_two_products,
        sum_of_two_products,
        scaled_product,
        product_that_all_ranks_sum,
    )
}


def check(model: Callable[..., Any], program: Callable[..., Any], inputs: list[Tensor]) -> None:
    with comparing(False):
        found = model(*inputs)
    for one, other in zip(found, program(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        assert one.stride() == other.stride()


def symbolic_sizes(me: Rank, name: str) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    program = PROGRAMS[name](me)
    model = compiled_up_to_the_pass(program, OverlapPass(Choices(strict=True)), dynamic=True)
    for rows in (3, 5, 8):
        check(model, program, tensors(me, rows))
    (graph,) = symm_overlap.inductor.report().graphs
    assert graph.fused == 1


SLOW = product_with_bias.__name__, sum_of_two_products.__name__, product_that_all_ranks_sum.__name__


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS])
def test_sizes_may_be_symbolic(ranks: Pool, name: str) -> None:
    ranks.run(2, symbolic_sizes, name, timeout=120)


def symbolic_batch(me: Rank) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()

    def program(x: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        total = (x.flatten(0, 1) @ one).view(*x.shape[:2], 4) + (x.flatten(0, 1) @ two).view(*x.shape[:2], 4)
        return all_reduce(total, "sum", me.group), total.cos()

    model = compiled_up_to_the_pass(program, OverlapPass(Choices(strict=True)), dynamic=True)
    for batch in (2, 3, 7):
        x = torch.randn(batch, 6, 6, dtype=F64)
        torch._dynamo.mark_static(x, (1, 2))
        check(model, program, [x, *tensors(me, 1)[1:3]])
    (graph,) = symm_overlap.inductor.report().graphs
    assert graph.fused == 1


def test_a_kept_sum_over_all_ranks_may_have_a_symbolic_batch_that_they_cannot_share(ranks: Pool) -> None:
    """The ranks share all rows instead: the batch times the length of a sequence, which is known to be even."""
    ranks.run(2, symbolic_batch, timeout=120)


@without_cached_graphs
def all_of_the_compiler(me: Rank, folder: str) -> None:
    start_anew(folder)

    def program(*inputs: Tensor) -> list[Tensor]:
        return [each for name in PROGRAMS for each in PROGRAMS[name](me)(*inputs)]

    model = torch.compile(program, options=symm_overlap.inductor.options(strict=True))
    check(model, program, tensors(me, 3))
    assert symm_overlap.inductor.report().fused == len(PROGRAMS)


@pytest.mark.slow
def test_what_inductor_generates_computes_the_same(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(2, all_of_the_compiler, str(tmp_path), timeout=240)


def gradients(me: Rank) -> None:
    """The product is saved, because the gradient of its other use needs it."""
    torch._dynamo.reset()
    symm_overlap.inductor.clear()

    def program(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Tensor:
        product = torch.addmm(bias, x.flatten(0, 1), one)
        return reduce_scatter_tensor_autograd(product, "sum", 0, me.group).sin().sum() + product.cos().sum()

    model = compiled_up_to_the_pass(program, OverlapPass(Choices()))
    results = []
    for function in (model, program):
        inputs = [tensor.requires_grad_() for tensor in tensors(me, 3)]
        with comparing(False):
            loss = function(*inputs)
            loss.backward()
        results.append([loss.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    forward, _ = symm_overlap.inductor.report().graphs
    assert forward.fused == 1


def test_gradients_of_both_uses(ranks: Pool) -> None:
    ranks.run(2, gradients, timeout=120)


class Recorded(OverlapPass):
    """The pass, which also records the names of the ops in each graph."""

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        ops.append([str(node.target) for node in graph.nodes])


ops: list[list[str]] = []


def scaled_products_are_saved(me: Rank) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    ops.clear()
    torch.manual_seed(me.rank)
    module = models.Float8MLP(me.group)
    model = compiled_up_to_the_pass(models.Checkpointed(module, keep_matmuls=True), Recorded(Choices(strict=True)))
    x, results = torch.randint(-2, 3, (6, models.WIDTH)).float().requires_grad_(), []
    for function in (model, module):
        with comparing(False):
            y = function(x)
            results.append([y, *torch.autograd.grad((y * y.detach().sign()).sum(), [x, *module.parameters()])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.any()
    assert "symm_overlap.fused_scaled_matmuls_reduce_scatter_keep.compiled" in ops[0]
    assert len(ops) == 2
    for graph in ops:
        assert not [op for op in graph if "aten._scaled_mm" in op], "every product is computed once, by a fused op"


def test_checkpointed_modules_whose_scaled_products_are_saved(ranks: Pool) -> None:
    ranks.run(2, scaled_products_are_saved, timeout=120)
