"""A scattered sum of scaled matmuls equals the same products, sums and collective in torch, on each path.

Roundings between these operations are the same, and the products and sums that are kept are the same too. Inputs are
whole numbers up to 15, so that every product is exact in float32 and has to be rounded in bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.collective import reference as ref
from tests.collective.scaled_cases import (
    E4M3,
    E5M2,
    ONE,
    WAYS,
    K,
    float8,
    needs_row_scales,
    ops,
    powers_of_two,
    scaled_mm,
    way,
    weight,
)
from tests.ranks import Pool, Rank
from tests.transforms import in_place, poisoned_outputs

BF16 = torch.bfloat16
# The number of products, whether there is an addend, which products are kept, and whether the sum is kept.
CASES: list[tuple[int, bool, list[int], bool]] = [
    (2, False, [], False),
    (3, True, [], False),
    (1, True, [], False),
    (2, False, [0], False),
    (2, True, [1, 0], False),
    (1, False, [0], False),
    (1, True, [0], True),
    (3, False, [2], True),
]


def whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(E4M3)


def lists_of(rank: int, lead: list[int], columns: int, products: int, per_row: bool) -> list[list[Any]]:
    """Return arguments of the op: products of different contracted sizes. The second product has a bias."""
    made: list[list[Any]] = []
    for index in range(products):
        seed, inner = 10 * rank + index, K * (1 + index % 2)
        A_scale = powers_of_two((*lead, 1), seed) if per_row else torch.tensor(2.0**index)
        B_scale = powers_of_two((1, columns), seed) if per_row else torch.tensor(0.5)
        bias = torch.arange(float(columns)).to(BF16) if index == 1 else None
        A, B = whole_numbers(*lead, inner, seed=seed), whole_numbers(columns, inner, seed=seed + 5).t()
        made.append([A, B, A_scale, B_scale, bias, None])
    return [list(each) for each in zip(*made, strict=True)]


def in_torch(lists: list[list[Any]], addend: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Compute the products and their sum with torch's ops."""
    products = [scaled_mm(A, B, a, b, bias, BF16) for A, B, a, b, bias, _ in zip(*lists, strict=True)]
    total = products[0]
    for product in (*products[1:], *([] if addend is None else [addend])):
        total = total + product
    return products, total


def equal_sums(me: Rank, per_row: bool, ways: list[tuple[Any, ...]]) -> None:
    w = me.world
    for dim, (count, has_addend, keep, keep_sum) in itertools.product(range(3), CASES):
        lead, columns = [3, 5], 4
        if dim < 2:
            lead[dim] *= w
        else:
            columns *= w
        everyone = [lists_of(rank, lead, columns, count, per_row) for rank in range(w)]
        addends = [ref.binary((*lead, columns), BF16, rank) if has_addend else None for rank in range(w)]
        found = [in_torch(*each) for each in zip(everyone, addends, strict=True)]
        expected = sum(total.float() for _, total in found).to(BF16).chunk(w, dim)[me.rank]
        products, total = found[me.rank]
        arguments = (*everyone[me.rank], addends[me.rank], "sum", dim, me.group_name, BF16, [False] * count)
        for chosen in ways:
            with way(*chosen):
                if not keep and not keep_sum:
                    ref.same(ops.fused_scaled_matmuls_reduce_scatter(*arguments), expected.contiguous())
                    continue
                output, kept, whole = ops.fused_scaled_matmuls_reduce_scatter_keep(
                    *arguments, keep=keep, keep_sum=keep_sum
                )
            ref.same(output, expected.contiguous())
            for index, product in zip(keep, kept, strict=True):
                ref.same(product, products[index])
            assert (whole is not None) == keep_sum
            if keep_sum:
                ref.same(whole, total)


@pytest.mark.parametrize("per_row", [False, pytest.param(True, marks=needs_row_scales)], ids=["tensor", "rows"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_sum_has_the_bits_of_torchs_products_and_sums(ranks: Pool, world: int, per_row: bool) -> None:
    ranks.run(world, equal_sums, per_row, WAYS[:1] if world == 1 else WAYS)


def sums_in_poisoned_memory(me: Rank) -> None:
    with poisoned_outputs(), in_place(False):  # with a GPU's plans, which copy
        equal_sums(me, False, WAYS)


def test_all_of_what_is_kept_is_written(ranks: Pool) -> None:
    ranks.run(2, sums_in_poisoned_memory)


def layouts_and_sizes(me: Rank) -> None:
    """Test inputs that are not contiguous, and tensors without elements."""
    w = me.world
    for m, k, n in ((1, 16, 1), (2, 16, 3), (0, 4, 5), (3, 0, 5), (3, 4, 0)):
        for dim in (0, 1):
            A = float8(k, m * w, seed=1).t()
            B = float8(n * w, k, seed=2, dtype=E5M2).t()
            addend = torch.ones(n * w, m * w).t()
            lists = ([A, A], [B, B], [ONE, ONE], [ONE, ONE], [None, torch.ones(n * w)], [None] * 2)
            rest = ("avg", dim, me.group_name, torch.float32, [False] * 2)
            expected = 2 * (A.float() @ B.float()) + 2
            output, _, total = ops.fused_scaled_matmuls_reduce_scatter_keep(*lists, addend, *rest, keep_sum=True)
            ref.same(total, expected)
            ref.same(output, expected.chunk(w, dim)[me.rank].contiguous() if output.numel() else output)
            assert output.shape == ((m, n * w) if dim == 0 else (m * w, n))


@pytest.mark.parametrize("world", [1, 3])
def test_any_strides_and_no_elements(ranks: Pool, world: int) -> None:
    ranks.run(world, layouts_and_sizes)


def rejected(me: Rank) -> None:
    A, B = float8(4, K), weight(K, 16)
    ones, none, name = [ONE, ONE], [None, None], me.group_name
    good = {"As": [A, A], "Bs": [B, B], "A_scales": ones, "B_scales": ones, "biases": none, "result_scales": none}
    good |= {"addend": None, "reduce_op": "sum", "scatter_dim": 0, "group_name": name}  # type: ignore[dict-item]
    good |= {"out_dtype": BF16, "use_fast_accum": [False] * 2}  # type: ignore[dict-item]
    plain, keep = ops.fused_scaled_matmuls_reduce_scatter, ops.fused_scaled_matmuls_reduce_scatter_keep
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "As has 1 entries and Bs has 2", {"As": [A]}),
        (ValueError, "A_scales has 1 entries and Bs has 2", {"A_scales": [ONE]}),
        (ValueError, "biases has 0 entries and Bs has 2", {"biases": []}),
        (ValueError, "Bs is empty", {each: [] for each in ("As", "Bs", "A_scales")}),
        (TypeError, r"As\[1\] is torch.float32", {"As": [A, A.float()]}),
        (TypeError, r"As\[1\] is on meta and As\[0\] is on cpu", on_meta(A, B)),
        (ValueError, r"Bs\[1\] of shape \(16, 16\) does not match As\[1\]", {"Bs": [B, weight(16, 16)]}),
        (ValueError, r"one shape: got \[\[4, 16\], \[4, 8\]\]", {"Bs": [B, weight(K, 8)]}),
        (ValueError, r"one shape: got", {"addend": torch.ones(2, 16, dtype=BF16)}),
        (TypeError, "addend is torch.float32", {"addend": torch.ones(4, 16)}),
        (TypeError, "product is torch.float64", {"out_dtype": torch.float64}),
        (ValueError, "size 3, which 2 ranks", {"As": [A[:3], A[:3]]}),
        (ValueError, "scatter_dim is 2", {"scatter_dim": 2}),
        (ValueError, "reduce_op is 'max'", {"reduce_op": "max"}),
        (ValueError, "_scaled_mm cannot", {"biases": [None, torch.ones(3)]}),
    ]
    for error, message, wrong in bad:
        for op in (plain, partial(keep, keep_sum=True)):
            with pytest.raises(error, match=message):
                op(**good | wrong)
    kept: list[tuple[str, Callable[[], object]]] = [
        ("to keep nothing, call fused_scaled_matmuls_reduce_scatter", lambda: keep(**good)),
        (r"keep is \[2\]: name products", lambda: keep(**good, keep=[2])),
        (r"keep is \[0, 0\]: name products", lambda: keep(**good, keep=[0, 0])),
    ]
    for message, call in kept:
        with pytest.raises(ValueError, match=message):
            call()
    assert plain(**good).shape == (2, 16)  # the group stays usable


def on_meta(A: Tensor, B: Tensor) -> dict[str, Any]:
    one = ONE.to("meta")
    return {"As": [A, A.to("meta")], "Bs": [B, B.to("meta")], "A_scales": [ONE, one], "B_scales": [ONE, one]}


def test_bad_arguments_are_rejected_before_any_communication(ranks: Pool) -> None:
    ranks.run(2, rejected)
