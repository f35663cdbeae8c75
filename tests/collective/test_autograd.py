"""First and second gradients of every combination of arguments equal those of plain PyTorch on all ranks' inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap.collective.problem import OPS
from tests.collective import reference as ref
from tests.collective.gradient_cases import CASES, F64, Gather, loss_of
from tests.ranks import Pool, Rank

PATHS: list[tuple[str | None, int | None, int | None]] = [
    (None, None, None),
    ("pipelined", 2, 1),
    ("pipelined", 1, 2),
    ("sequential", 1, 1),
    ("c10d", 2, 1),
]


def gradients_are_those_of_plain_pytorch(me: Rank) -> None:
    for case in CASES:
        everyone = [case.inputs(rank, me.world) for rank in range(me.world)]
        total = sum(loss_of(outputs, seed=7 * rank) for rank, outputs in enumerate(case.plain(everyone)))
        flat = [tensor for rank_inputs in everyone for tensor in rank_inputs]
        expected = torch.autograd.grad(total, flat, create_graph=True)  # type: ignore[arg-type]
        count = len(everyone[0])
        per_rank = [list(expected[i * count : (i + 1) * count]) for i in range(me.world)]
        total_second = sum(loss_of(grads_of, seed=50 + rank) for rank, grads_of in enumerate(per_rank))
        expected_seconds = torch.autograd.grad(total_second, everyone[me.rank])  # type: ignore[arg-type]
        for path, chunks, streams in PATHS:
            inputs = case.inputs(me.rank, me.world)
            with symm_overlap.force_path(path, chunks=chunks, streams=streams):
                loss = loss_of(case.run(inputs, me), seed=7 * me.rank)
                grads = torch.autograd.grad(loss, inputs, create_graph=True)
                seconds = torch.autograd.grad(loss_of(list(grads), seed=50 + me.rank), inputs)
            for found, wanted in zip([*grads, *seconds], [*per_rank[me.rank], *expected_seconds], strict=True):
                assert found.shape == wanted.shape
                assert ref.relative_error(found.detach(), wanted.detach()) < 1e-12, f"{case} on the path {path}"


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_first_and_second_gradients_are_those_of_plain_pytorch_on_every_path(ranks: Pool, world: int) -> None:
    ranks.run(world, gradients_are_those_of_plain_pytorch, timeout=120)


def modified_in_place(me: Rank, op: str, dim: int) -> None:
    """Outputs may be modified in place, as after ``A @ B``: they are not views, which autograd would protect."""
    name, w = me.group_name, me.world

    def outputs(x: Tensor, B: Tensor) -> list[Tensor]:
        if op == "all_gather_matmul":
            # By default the gathered tensor is kept for the backward pass, and autograd rejects changes of it.
            gathered, products = symm_overlap.all_gather_matmul(x, [B, B], dim, name, save="shard")
            return [gathered, *products]
        if op == "matmul_reduce_scatter":
            return [symm_overlap.matmul_reduce_scatter(x, B, "sum", dim, name)]
        if op == "matmul_all_reduce":
            return [symm_overlap.matmul_all_reduce(x, B, "sum", name)]
        if op == "all_gather":
            return [symm_overlap.all_gather(x, dim, name)]
        if op == "reduce_scatter":
            return [symm_overlap.reduce_scatter(x, "sum", dim, name)]
        return [symm_overlap.all_reduce(x, "sum", name)]

    rows = 6 * (w if op == "all_gather_matmul" and dim == 2 else 1)
    weight = ref.normal((rows, 6), F64, seed=3)
    grads = []
    for in_place in (True, False):
        x, B = ref.normal((6, 6, 6), F64, seed=me.rank).requires_grad_(), weight.clone().requires_grad_()
        found = outputs(x, B)
        for index, y in enumerate(found):
            if in_place:
                y += index
                y.relu_()
            else:
                found[index] = (y + index).relu()
        sum((index + 1) * y.sum() for index, y in enumerate(found)).backward()
        grads.append([x.grad, B.grad])
    assert grads[0][0].any()
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_may_be_modified_in_place(ranks: Pool, world: int) -> None:
    for op in OPS:
        for dim in (0, 1, 2) if "scaled" not in op else ():  # scaled ops have no gradient
            ranks.run(world, modified_in_place, op, dim)


def unused_outputs_and_inputs(me: Rank) -> None:
    case = Gather(0, return_A=True)
    A, B1, B2, _ = case.inputs(me.rank, me.world)
    _, (y1, _) = symm_overlap.all_gather_matmul(A, [B1, B2], 0, me.group)
    gA, gB1, gB2 = torch.autograd.grad(y1.sum(), (A, B1, B2), allow_unused=True)
    assert gB2 is None
    assert gA.abs().sum() > 0
    assert gB1.abs().sum() > 0

    frozen = B1.detach()
    whole = case.plain([case.inputs(r, me.world) for r in range(me.world)])[0][0].detach()
    Y = symm_overlap.matmul_reduce_scatter(whole, B2, "sum", 0, me.group)
    (only,) = torch.autograd.grad(Y.sum(), (B2,))
    assert only.shape == B2.shape
    bias = B2[0].detach().requires_grad_()
    Y = symm_overlap.matmul_reduce_scatter(whole, B2.detach(), "avg", 0, me.group, bias)
    (only,) = torch.autograd.grad(Y.sum(), bias)
    assert only.eq(whole.shape[0] * whole.shape[1] / me.world).all()
    _, (y,) = symm_overlap.all_gather_matmul(A, [frozen], 0, me.group, return_A=False)
    (gA,) = torch.autograd.grad(y.sum(), (A,))
    ones = torch.ones(2, 3, 5, dtype=F64)
    assert ref.relative_error(gA, sum(ones @ case.inputs(r, me.world)[1].detach().t() for r in range(me.world))) < 1e-12


def outputs_that_need_no_gradient(me: Rank) -> None:
    case = Gather(0)
    for which in itertools.product((False, True), repeat=4):
        A, B1, B2, bias = (tensor.detach() for tensor in case.inputs(me.rank, me.world))
        for tensor, needed in zip((A, B1, B2, bias), which, strict=True):
            tensor.requires_grad_(needed)
        for biases in (None, [None, bias]):
            gathered, products = symm_overlap.all_gather_matmul(A, [B1, B2], 0, me.group, biases=biases)
            one, two = A @ B1, A @ B2 + (0 if biases is None else bias)
            found = [gathered.requires_grad, *(product.requires_grad for product in products)]
            assert found == [A.requires_grad, one.requires_grad, two.requires_grad], which


def test_only_outputs_that_depend_on_it_need_the_gradient_of_an_input(ranks: Pool) -> None:
    ranks.run(2, outputs_that_need_no_gradient)


def test_outputs_nobody_used_and_weights_that_are_frozen(ranks: Pool) -> None:
    ranks.run(2, unused_outputs_and_inputs)


def kept_for_backward(me: Rank) -> dict[str, list[tuple[int, ...]]]:
    A, B, *_ = Gather(0).inputs(me.rank, me.world)
    kept: dict[str, list[tuple[int, ...]]] = {}
    for return_A, save in itertools.product((True, False), ("shard", "gathered")):
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.append(tuple(t.shape)), lambda _: None
        ):
            symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=return_A, save=save)
        kept[f"{return_A} {save}"] = shapes
    return kept


def test_save_decides_what_is_kept_for_the_backward_pass(ranks: Pool) -> None:
    kept = ranks.run(2, kept_for_backward)[0]
    for return_A in (True, False):
        assert kept[f"{return_A} shard"] == [(2, 3, 4), (4, 5)]
        assert kept[f"{return_A} gathered"] == [(4, 3, 4), (4, 5)]
