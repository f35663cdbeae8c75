"""Graphs that plain compilation accepts, and that an earlier pass rejected or changed: sizes that are not known, long
sums, nodes of another pass, random numbers, and factors whose sizes differ between ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph

from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.report import clear, recorded
from symm_overlap.inductor.writer import Writer

from ..collective.test_fake_group import fake_group
from .cases import gather, reduce, scatter
from .tracing import compiled_up_to_the_pass, inputs_of, overlapped, traced

New = Callable[..., Tensor]
ROWS = 16  # as many as the products have columns


def marked(*shape: int) -> Tensor:
    """Return a tensor whose rows the compiler may not take for a number."""
    x = torch.ones(shape)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def fused(run: Callable[..., Any], *inputs: Tensor) -> int:
    """Compile and call a function. Return how many collectives the pass fused. Nothing may be assumed about sizes."""
    torch._dynamo.reset()
    clear()
    compiled_up_to_the_pass(run, OverlapPass(Choices()), fullgraph=True)(*inputs)
    (graph,) = recorded().graphs
    return graph.fused


def test_rows_that_happen_to_be_as_many_as_columns_stay_dynamic() -> None:
    w, row = torch.ones(8, ROWS), torch.ones(ROWS)
    with fake_group(2) as group:
        assert fused(lambda x: reduce(x @ w + row, group), marked(ROWS, 8)) == 1
        assert fused(lambda x, y: reduce(x @ w + y, group), marked(ROWS, 8), marked(ROWS, 1)) == 0
        assert fused(lambda x, y: reduce(torch.addmm(y, x, w), group), marked(ROWS, 8), marked(ROWS, ROWS)) == 1
        assert fused(lambda x: reduce(torch.addmm(row, x, w), group), marked(ROWS, 8)) == 1


def test_rows_that_only_the_run_knows() -> None:
    w, row = torch.ones(8, ROWS), torch.ones(ROWS)
    x, chosen = torch.ones(ROWS, 8), torch.ones(ROWS) > 0

    def gathered(x: Tensor, chosen: Tensor, group: str) -> list[Tensor]:
        whole = gather(x[chosen], 2, group)
        return [whole @ w, whole.relu()]

    with fake_group(2) as group, mock.patch.object(torch._dynamo.config, "capture_dynamic_output_shape_ops", True):
        assert fused(lambda x, chosen: reduce(x[chosen] @ w + row, group), x, chosen) == 1
        assert fused(lambda x, chosen: reduce(x[chosen] @ w + x[chosen][:, :1], group), x, chosen) == 0
        assert fused(lambda x, chosen: reduce(x[chosen] @ w, group), x, chosen) == 1
        assert fused(lambda x, chosen: gathered(x, chosen, group), x, chosen) == 1


def test_a_sum_of_very_many_terms() -> None:
    def program(world: int, name: str, new: New) -> Tensor:
        return scatter(new(4 * world, 3) @ new(3, 5) + new(4 * world, 5), world, name)

    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32)).graph
        (collective,) = (node for node in graph.nodes if "reduce_scatter" in str(node.target))
        total: Any = collective.args[0]
        write, term = Writer(graph, collective), total.args[1]
        for _ in range(1200):  # tracing them would take a minute
            total = write.call(torch.ops.aten.add.Tensor, total, term)
        collective.args = (total, *collective.args[1:])
        clear()
        OverlapPass(Choices())(graph)
    assert recorded().graphs[0].fused == 1


def test_a_users_pass_may_add_nodes_without_values() -> None:
    def add_relu(graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.mm.default:
                with graph.inserting_after(node):
                    relu = graph.call_function(torch.ops.aten.relu.default, (node,))
                node.replace_all_uses_with(relu, delete_user_cb=lambda user, relu=relu: user is not relu)
        graph.owning_module.constant = torch.ones(2)
        with graph.inserting_before(graph.output_node()):
            constant = graph.get_attr("constant")
            graph.call_function(torch.ops.aten.neg.default, (constant,))
            graph.call_function(torch.ops.aten.bmm.default, (constant, constant))

    def program(world: int, name: str, new: New) -> list[Tensor]:
        return [gather(new(4, 6), world, name) @ new(6, 5), reduce(new(4, 6) @ new(6, 5) + new(4, 5), name)]

    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        clear()
        OverlapPass(Choices(), before=add_relu)(graph.graph)
    assert recorded().graphs[0].fused == 1


def one_product_for_two_reductions(world: int, name: str, new: New) -> list[Tensor]:
    product = new(4 * world, 6) @ new(6, 5)
    return [scatter(product, world, name), reduce(product, name)]


def test_a_second_reduction_of_a_product_is_a_collective_beside_a_matmul() -> None:
    with fake_group(2) as group:
        inputs = inputs_of(one_product_for_two_reductions, 2, group, torch.float32)
        _, report = overlapped(traced(one_product_for_two_reductions, 2, group, inputs))
    (skipped,) = report.skipped
    assert (skipped.reason, skipped.candidate) == ("the op of another collective returns it", True)
    assert report.fused == 1


def drawing(world: int, name: str, new: New) -> list[Tensor]:
    """The second weight is drawn after something that is computed from the first product."""
    whole, w = gather(new(4, 6), world, name), new(6, 5)
    first = torch.bernoulli((whole @ w).sigmoid())
    return [first, whole @ torch.rand_like(w)]


def drawing_beside_a_kept_product(world: int, name: str, new: New) -> list[Tensor]:
    left, w = new(4 * world, 6), new(6, 5)
    product = left @ w
    first = torch.bernoulli(product.sigmoid())
    return [first, scatter(product + left @ torch.rand_like(w), world, name)]


def drawing_from_what_is_gathered(world: int, name: str, new: New) -> list[Tensor]:
    """The weight is drawn after a view of the gathered tensor has been drawn from."""
    whole, w = gather(new(4, 6), world, name), new(6, 5)
    first = torch.bernoulli(whole.view(2, -1).sigmoid())
    return [first, whole @ torch.rand_like(w)]


def run_and_save_rng_state(draw: OpOverload, *args: Any) -> Tensor:
    """Draw as torch does in a compiled checkpoint."""
    _, drawn = torch.ops.higher_order.run_and_save_rng_state(draw, *args)
    return drawn


def drawing_in_a_checkpoint(world: int, name: str, new: New) -> list[Tensor]:
    whole, w = gather(new(4, 6), world, name), new(6, 5)
    first = run_and_save_rng_state(torch.ops.aten.bernoulli.default, (whole @ w).sigmoid())
    return [first, whole @ run_and_save_rng_state(torch.ops.aten.rand_like.default, w)]


def drawing_in_a_condition(world: int, name: str, new: New) -> list[Tensor]:
    def draw(x: Tensor) -> Tensor:
        return torch.ops.aten.rand_like.default(x)

    whole, w = gather(new(4, 6), world, name), new(6, 5)
    first = torch.cond(w.sum() > 0, draw, draw, (whole @ w,))
    return [first, whole @ torch.rand_like(w)]


@pytest.mark.parametrize(
    ("program", "matmuls"),
    [
        *((drawing, 1), (drawing_from_what_is_gathered, 0), (drawing_beside_a_kept_product, 0)),
        *((drawing_in_a_checkpoint, 1), (drawing_in_a_condition, 1)),
    ],
)
def test_random_numbers_are_drawn_in_the_order_of_the_program(program: Callable[..., Any], matmuls: int) -> None:
    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        changed, report = overlapped(graph)
    drawn = [
        [node.name for node in each.graph.nodes if re.match("bernoulli|rand|run_and_save|cond", node.name)]
        for each in (graph, changed)
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 2
    assert sum(site.matmuls for site in report.sites) == matmuls


@pytest.mark.parametrize("cast_first", [True, False])
def test_all_ranks_give_the_same_products_of_a_sum_to_the_op(cast_first: bool) -> None:
    """The ranks share the features unevenly, so on one of them the product in half precision takes longer."""

    def program_of(cast: int, plain: int) -> Callable[..., Tensor]:
        def program(world: int, name: str, new: New) -> Tensor:
            half = new(4 * world, cast).bfloat16() @ new(cast, 5).bfloat16()
            terms = [half.float(), new(4 * world, plain) @ new(plain, 5)]
            one, other = terms if cast_first else reversed(terms)
            return scatter(one + other, world, name)

        return program

    with fake_group(2) as group:
        kinds = []
        for program in (program_of(64, 4), program_of(4, 64)):
            changed, report = overlapped(traced(program, 2, group, inputs_of(program, 2, group, torch.float32)))
            (op,) = (node for node in changed.graph.nodes if "fused_matmuls_reduce_scatter" in str(node.target))
            kinds.append((op.args[0][0].meta["val"].dtype, op.kwargs.get("sum_dtype"), report.fused))
    assert kinds[0] == kinds[1]


def test_a_write_into_a_view_of_a_product_that_was_replaced_before() -> None:
    """A batch of one is replaced by a matrix first. The fake tensors of its views stay those of views of the batch."""

    def program(world: int, name: str, new: New) -> Any:
        product = torch.bmm(new(1, 2 * world, 6), new(1, 6, 5))
        product.select(1, 0).mul_(2)
        return reduce(product, name)

    with fake_group(2) as group:
        _, report = overlapped(traced(program, 2, group, inputs_of(program, 2, group, torch.float32)))
    assert [site.reason for site in report.sites] == [
        "aten.mul_.Tensor writes into a tensor that the fused op would use"
    ]


def test_a_step_that_updates_its_parameters_is_fused() -> None:
    """torch.compile writes into inputs at the end of a graph."""
    x, w, momentum = torch.ones(4, 8), torch.ones(8, ROWS), torch.zeros(8, ROWS)
    with fake_group(2) as group:

        def step(x: Tensor, w: Tensor, momentum: Tensor) -> Tensor:
            y = scatter(gather(x, 2, group) @ w, 2, group)
            momentum.mul_(0.5).add_(reduce(x.t() @ y, group))
            w.sub_(momentum)
            x.sub_(scatter(gather(y, 2, group) @ w.t(), 2, group))
            return y.sum()

        assert fused(step, x, w, momentum) == 5
