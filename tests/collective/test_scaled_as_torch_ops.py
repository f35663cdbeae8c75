"""Scaled matmuls work with opcheck, fake tensors, torch.compile and FLOP counters, and say if a gradient is missing."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import symm_overlap
from tests.collective import reference as ref
from tests.collective.scaled_cases import ONE, K, bits, float8, ops, powers_of_two, rows_can_be_scaled, weight
from tests.collective.test_fake_group import fake_group
from tests.ranks import Pool, Rank

NAMES = {
    "all_gather": "fused_all_gather_scaled_matmul",
    "reduce_scatter": "fused_scaled_matmul_reduce_scatter",
    "sum": "fused_scaled_matmuls_reduce_scatter",
    "sum_keep": "fused_scaled_matmuls_reduce_scatter_keep",
}
KEPT: dict[str, Any] = {"keep": [1], "keep_sum": True}


def samples(name: str, world: int, per_row: bool) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments of every op, for every dimension, and with an input that is not contiguous."""
    found: dict[str, list[tuple[Any, ...]]] = {op: [] for op in NAMES}
    for dim, turned in ((0, False), (1, False), (2, False), (0, True)):
        A = float8(2, 3, K).transpose(0, 1) if turned else float8(3, 2, K)
        n = 4 * world
        B = weight(K * (world if dim == 2 else 1), n)
        lists = ([torch.ones(n), None], [None, ONE], [torch.bfloat16, None], [False, True])
        rows, columns = (torch.ones(3, 2, 1), torch.ones(1, n)) if per_row else (ONE, ONE)
        found["all_gather"].append((A, [B, B], rows, [columns] * 2, dim, name, *lists))
        X = float8(3 * world, 2 * world, K)
        rows = torch.ones(3 * world, 2 * world, 1) if per_row else ONE
        rest = (None if dim else [*X.shape[:-1], n], None, None, torch.float16, False)
        found["reduce_scatter"].append((X, weight(K, n), rows, columns, "avg", dim, min(dim, 1), name, *rest))
        lists = ([X, X], [weight(K, n)] * 2, [rows] * 2, [columns] * 2, [torch.ones(n), None], [None, ONE])
        addend = torch.ones(*X.shape[:-1], n).half() if dim else None
        for op in ("sum", "sum_keep"):
            found[op].append((*lists, addend, "avg", dim, name, torch.float16, [False, False]))
    return found


def call(op: str, arguments: Any) -> Any:
    return op_of(op)(*arguments, **options_of(op))


def options_of(op: str) -> dict[str, Any]:
    return KEPT if op == "sum_keep" else {}


def op_of(name: str) -> Any:
    return getattr(ops, NAMES[name]).default


def forms(found: Any) -> list[Any]:
    tensors = [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, Tensor)]
    return [(each.shape, each.stride(), each.dtype) for each in tensors]


def fake_as_real(me: Rank) -> None:
    for op, calls in samples(me.group_name, me.world, rows_can_be_scaled()).items():
        for arguments in calls:
            real = forms(call(op, arguments))
            with FakeTensorMode() as mode:
                fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
                assert forms(call(op, fakes)) == real


@pytest.mark.parametrize("world", [1, 2])
def test_fake_tensors_have_the_strides_and_dtypes_of_real_ones(ranks: Pool, world: int) -> None:
    ranks.run(world, fake_as_real)


def close(found: Tensor, expected: Tensor, **_: Any) -> bool:
    """Replace ``torch.allclose``, which does not accept float8."""
    return torch.equal(bits(found), bits(expected))


def checked(me: Rank) -> None:
    with mock.patch.object(torch, "allclose", close):
        for op, calls in samples(me.group_name, me.world, rows_can_be_scaled()).items():
            for arguments in calls[1:3]:
                opcheck(op_of(op), arguments, options_of(op))


def test_opcheck_is_green(ranks: Pool) -> None:
    ranks.run(2, checked, timeout=120)


def compiled(me: Rank) -> None:
    def all_ops(A: Tensor, B: Tensor, scale: Tensor) -> Tensor:
        lists = ([None], [None], [torch.bfloat16], [False])
        _, (y,) = ops.fused_all_gather_scaled_matmul(A, [B], scale, [ONE], 0, me.group_name, *lists, return_A=False)
        X, s = A.repeat(me.world, 1), scale.repeat(me.world, 1) if scale.dim() else scale
        options = {"out_dtype": torch.bfloat16}
        z = ops.fused_scaled_matmul_reduce_scatter(X, B, s, ONE, "sum", 0, 0, me.group_name, None, **options)
        lists = ([X, X], [B, B], [s, s], [ONE, ONE], [None] * 2, [None] * 2)
        rest = ("avg", 1, me.group_name, torch.bfloat16, [False] * 2)
        summed = ops.fused_scaled_matmuls_reduce_scatter(*lists, None, *rest)
        kept = ops.fused_scaled_matmuls_reduce_scatter_keep(*lists, None, *rest, keep=[1])
        return torch.cat([y[: len(z)] + z, summed.view(-1, 16), kept[0].view(-1, 16), *kept[1]])

    function = torch.compile(all_ops, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 6):
        A, B = float8(rows, K, seed=me.rank), weight(K, 16)
        scale = powers_of_two((rows, 1), seed=me.rank) if rows_can_be_scaled() else 2 * ONE
        ref.same(function(A, B, scale), all_ops(A, B, scale))


@pytest.mark.slow
def test_they_compile_as_one_graph_with_changing_sizes(ranks: Pool) -> None:
    ranks.run(2, compiled, timeout=120)


@pytest.mark.parametrize("world", [2, 3])
def test_a_fake_group_gives_the_forms_of_a_real_one(world: int) -> None:
    per_row = rows_can_be_scaled()
    with fake_group(world, rank=world - 1) as name:
        for op, calls in samples(name, world, per_row).items():
            for arguments in calls:
                real = forms(call(op, arguments))
                with FakeTensorMode() as mode:
                    fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
                    assert forms(call(op, fakes)) == real


def without_gradient(me: Rank) -> None:
    A, B = float8(4, K), weight(K, 16)
    bias, scale = torch.ones(16, requires_grad=True), torch.ones((), requires_grad=True)
    gathered = symm_overlap.all_gather_scaled_matmul(A, [B], ONE, [ONE], 0, me.group, biases=[bias])[1][0].sum()
    scattered = symm_overlap.scaled_matmul_reduce_scatter(A, B, scale, ONE, "sum", 0, me.group).sum()
    with pytest.raises(NotImplementedError, match=r"no gradient.*fused_all_gather_matmul on bfloat16.*autograd.Func"):
        gathered.backward()
    with pytest.raises(NotImplementedError, match=r"no gradient.*fused_matmul_reduce_scatter on bfloat16"):
        scattered.backward()
    lists = ([A], [B], [scale], [ONE], [None], [None])
    arguments = (*lists, None, "sum", 0, me.group_name, torch.bfloat16, [False])
    with pytest.raises(NotImplementedError, match=r"no gradient.*fused_matmuls_reduce_scatter on bfloat16"):
        ops.fused_scaled_matmuls_reduce_scatter(*arguments).sum().backward()
    part, (product,), total = ops.fused_scaled_matmuls_reduce_scatter_keep(*arguments, keep=[0], keep_sum=True)
    for kept in (part, product, total):
        with pytest.raises(NotImplementedError, match=r"no gradient.*fused_matmuls_reduce_scatter_keep on bfloat16"):
            kept.sum().backward()


def test_the_backward_pass_says_that_there_is_none(ranks: Pool) -> None:
    ranks.run(2, without_gradient)


def flops(me: Rank) -> list[int]:
    counts = []
    for dim, op in itertools.product((0, 1), NAMES):
        with FlopCounterMode(display=False) as counter:
            call(op, samples(me.group_name, me.world, False)[op][dim])
        counts.append(counter.get_total_flops())
    return counts


def test_flop_are_those_of_the_matmuls(ranks: Pool) -> None:
    gather, scatter = 2 * (2 * 3 * 2 * K * 8) * 2, 2 * (6 * 4) * K * 8
    assert ranks.run(2, flops) == [[gather, scatter, 2 * scatter, 2 * scatter] * 2] * 2
