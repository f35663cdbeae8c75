"""A gather and a scaled matmul of float8 numbers equal a gather and ``torch._scaled_mm``, on each path.

The code that it shares with the reduce-scatter is tested here too, the rest of the latter in `test_scaled_scatter`.

Numbers and scales are chosen so that every product is exact. So one wrong row, or a scale of a wrong row, is visible.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap import _C
from symm_overlap.collective import scaled
from symm_overlap.runtime.cpu.backend import CpuBackend
from tests.collective import reference as ref
from tests.collective.scaled_cases import (
    E4M3,
    E5M2,
    ONE,
    WAYS,
    K,
    bits,
    float8,
    needs_row_scales,
    ops,
    powers_of_two,
    scaled_mm,
    scatter,
    way,
    weight,
)
from tests.ranks import Pool, Rank

# --- the gather


def scales_of(kind: str, shape: tuple[int, ...], dim: int, world: int) -> tuple[list[Tensor], Tensor]:
    """Return the ``A_scale`` of each rank, and the scales of the gathered tensor."""
    if kind == "tensor":
        return [torch.tensor(0.5)] * world, torch.tensor(0.5)
    lead = list(shape[:-1])
    if kind == "rows of the shard":
        own = [powers_of_two((*lead, 1), seed=rank) for rank in range(world)]
        return own, torch.cat(own, dim)
    if dim < len(lead):
        lead[dim] *= world
    whole = powers_of_two((*lead, 1), seed=7)
    return [whole] * world, whole


def gathers(me: Rank, kind: str, ways: list[tuple[Any, ...]]) -> None:
    """Gather for two weights. One has a bias. Their products have different dtypes, one of them float8."""
    dtypes = itertools.cycle(itertools.product((E4M3, E5M2), repeat=2))
    for shape, dim in [((5, 2, K), 0), ((5, 2, K), 1), ((5, 2, K), 2), ((7, K), 0), ((7, K), 1)]:
        last = dim == len(shape) - 1
        if last and kind == "rows of the shard":
            continue
        A_dtype, B_dtype = next(dtypes)
        shards = [float8(*shape, seed=rank, dtype=A_dtype) for rank in range(me.world)]
        Bs = [weight(K * (me.world if last else 1), n, seed=n, dtype=B_dtype) for n in (16, 3)]
        own, whole = scales_of(kind, shape, dim, me.world)
        B_scales = [torch.tensor(2.0) if kind == "tensor" else powers_of_two((1, n), seed=8) for n in (16, 3)]
        biases, outs = [torch.arange(16.0), None], [torch.float32, E4M3]
        gathered = torch.cat([shard.float() for shard in shards], dim).to(A_dtype)
        expected = [scaled_mm(gathered, *each) for each in zip(Bs, [whole] * 2, B_scales, biases, outs, strict=True)]
        for return_A, chosen in itertools.product((True, False), ways):
            with way(*chosen):
                A, products = ops.fused_all_gather_scaled_matmul(
                    shards[me.rank],
                    Bs,
                    own[me.rank],
                    B_scales,
                    dim,
                    me.group_name,
                    biases,
                    [None, None],
                    outs,
                    [False, True],
                    return_A=return_A,
                )
            assert (A is not None) == return_A
            if A is not None:
                torch.testing.assert_close(bits(A), bits(gathered), rtol=0, atol=0)
            for found, value in zip(products, expected, strict=True):
                assert found.dtype == value.dtype
                torch.testing.assert_close(bits(found), bits(value), rtol=0, atol=0)
            assert products[0].any()


@pytest.mark.parametrize("kind", ["tensor", *(pytest.param(kind, marks=needs_row_scales) for kind in ("rows", "own"))])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gather_equals_torchs_matmul_of_the_whole(ranks: Pool, world: int, kind: str) -> None:
    kinds = {"tensor": "tensor", "own": "rows of the shard", "rows": "gathered rows"}
    ranks.run(world, gathers, kinds[kind], WAYS[:1] if world == 1 else WAYS)


@contextmanager
def an_older_gpu() -> Iterator[None]:
    """Act as a device for which torch has no float8 matmul. Products are computed in float32, here all exactly."""
    older = mock.patch.object(CpuBackend, "multiplies_float8", return_value=False)
    with older, mock.patch.object(scaled, "scaled_mm", side_effect=AssertionError("torch's matmul must not be called")):
        yield


def on_an_older_gpu(me: Rank, kind: str) -> None:
    with an_older_gpu():
        gathers(me, kind, WAYS[:2])


def test_a_product_in_float32_has_scales_a_bias_and_for_float8_a_result_scale() -> None:
    A, B = float8(4, K, seed=1), weight(K, 16, seed=2)
    rows, columns, bias = powers_of_two((4, 1), seed=3), powers_of_two((1, 16), seed=4), torch.arange(32.0)[::2]
    product = (A.double() @ B.double()) * rows * columns + bias
    for dtype, result_scale in ((torch.float32, 1.0), (torch.bfloat16, 1.0), (E4M3, 2.0**-6)):
        out = torch.empty(4, 16).to(dtype)
        _C.multiply_scaled(A, rows, B, columns, bias, torch.tensor(2.0**-6), False, True, out)
        ref.same(out.float(), (product.float() * result_scale).to(dtype).float())
    empty, two = (A[:, :0], ONE.view(()), B[:0], ONE.view(())), torch.tensor([[2.0]])
    for in_float32, value in ((True, 0.0), (True, 6.0), (False, 0.0), (False, 1.5)):  # CPUs divide by the result scale
        out.fill_(float("nan"))
        bias = torch.full((16,), 3.0) if value else None
        _C.multiply_scaled(*empty, bias, two, False, in_float32, out)
        assert torch.equal(out.float(), torch.full((4, 16), value))
        assert bias is None or torch.equal(bias, torch.full((16,), 3.0))


@pytest.mark.parametrize("kind", ["tensor", pytest.param("rows of the shard", marks=needs_row_scales)])
def test_where_torch_multiplies_no_float8_products_are_the_same(ranks: Pool, kind: str) -> None:
    ranks.run(2, on_an_older_gpu, kind)


# --- mixed kinds of scales


def one_number_for_all(me: Rank) -> None:
    """torch accepts two numbers, or a scale for each row and one for each column. The ops also accept mixtures."""
    A, B, B_scale = float8(1, K, seed=me.rank), weight(K, 16, seed=3), powers_of_two((1, 16), seed=8)
    whole = torch.cat([float8(1, K, seed=rank).float() for rank in range(me.world)])
    rows = powers_of_two((me.world, 1), seed=5)
    cases = [(rows[me.rank : me.rank + 1], 2 * ONE, 2 * rows), (2 * ONE, B_scale, 2 * B_scale), (rows, ONE, rows)]
    for A_scale, weights_scale, scale in cases:
        gathered, (found,) = symm_overlap.all_gather_scaled_matmul(A, [B], A_scale, [weights_scale], 0, me.group)
        ref.same(gathered.float(), whole)  # returned by default
        ref.same(found, ((whole @ B.float()) * scale).bfloat16())
    scattered = symm_overlap.scaled_matmul_reduce_scatter(whole.to(E4M3), B, rows, 2 * ONE, "avg", 0, me.group)
    ref.same(scattered, ((whole @ B.float()) * 2 * rows).bfloat16()[me.rank : me.rank + 1])


@needs_row_scales
@pytest.mark.parametrize("world", [1, 3])
def test_one_number_is_the_scale_of_every_row_or_column(ranks: Pool, world: int) -> None:
    ranks.run(world, one_number_for_all)


def scaled_rows(me: Rank, kind: str) -> None:
    A, B, B_scale = float8(8, 2, K, seed=me.rank), weight(K, 16, seed=3), powers_of_two((1, 16), seed=8)
    own, whole = scales_of(kind, (8, 2, K), 0, me.world)
    with an_older_gpu(), way("pipelined", 3, 1):  # supports scales of rows with every torch
        _, (found,) = symm_overlap.all_gather_scaled_matmul(
            A, [B], own[me.rank], [B_scale], 0, me.group, out_dtype=torch.float32
        )
    As = torch.cat([float8(8, 2, K, seed=rank).float() for rank in range(me.world)])
    torch.testing.assert_close(found, (As @ B.float()) * whole * B_scale, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["rows of the shard", "gathered rows"])
def test_scales_of_rows_travel_with_them(ranks: Pool, kind: str) -> None:
    ranks.run(2, scaled_rows, kind)


# --- sizes


def sizes(me: Rank, chosen: tuple[Any, ...], per_row: bool) -> None:
    w, name = me.world, me.group_name
    for (m, k, n), bias in itertools.product(((0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (1, 1, 1)), (None, 1.0)):
        for dim in (0, 1):
            A, B = torch.ones(m, k).to(E4M3), torch.ones(n, k * (w if dim else 1)).to(E4M3).t()
            added = None if bias is None else torch.full((n,), bias)
            scales = (torch.ones(m, 1), torch.ones(1, n)) if per_row else (ONE, ONE)
            lists = ([added], [None], [torch.float32], [False])
            with way(*chosen):
                found_A, (found,) = ops.fused_all_gather_scaled_matmul(
                    A, [B], scales[0], [scales[1]], dim, name, *lists
                )
                shape = [m * w, n * w]
                X, Y = torch.ones(m * w, k).to(E4M3), torch.ones(n * w, k).to(E4M3).t()
                wide = (torch.ones(m * w, 1), torch.ones(1, n * w)) if per_row else (ONE, ONE)
                added = None if bias is None else torch.full((n * w,), bias)
                parts = [
                    scatter(keep)(X, Y, *wide, "sum", dim, dim, name, shape, added, out_dtype=torch.float32)
                    for keep in (False, True)
                ]
            ref.same(bits(found_A), bits(torch.cat([torch.ones(m, k)] * w, dim).to(E4M3)))
            ref.same(found, torch.full((m * (1 if dim else w), n), k * (w if dim else 1) + (bias or 0.0)))
            ref.same(parts[1].pop(), torch.full(shape, k + (bias or 0.0)))
            shape[dim] //= w
            for (part,) in parts:
                ref.same(part, torch.full(shape, (k + (bias or 0.0)) * w))


@pytest.mark.parametrize("per_row", [False, pytest.param(True, marks=needs_row_scales)], ids=["tensor", "rows"])
@pytest.mark.parametrize("world", [1, 3])
def test_empty_tensors_and_single_rows(ranks: Pool, world: int, per_row: bool) -> None:
    for chosen in WAYS[:1] if world == 1 else (WAYS[0], *WAYS[2:]):
        ranks.run(world, sizes, chosen, per_row)


# --- errors


def rejected(me: Rank) -> None:
    A, B, name = float8(4, K), weight(K, 16), me.group_name
    gather, scatter = symm_overlap.all_gather_scaled_matmul, symm_overlap.scaled_matmul_reduce_scatter
    bad: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "A_shard is torch.float32: supported", lambda: gather(A.float(), [B], ONE, [ONE], 0, name)),
        (TypeError, r"Bs\[1\] is torch.float32", lambda: gather(A, [B, B.float()], ONE, [ONE] * 2, 0, name)),
        (ValueError, "Bs is empty", lambda: gather(A, [], ONE, [], 0, name)),
        (ValueError, "B_scales has 2 entries", lambda: gather(A, [B], ONE, [ONE] * 2, 0, name)),
        (ValueError, r"scale of Bs\[0\] .*\(1, 16\)", lambda: gather(A, [B], ONE, [torch.ones(16)], 0, name)),
        (ValueError, "gather_dim is 2", lambda: gather(A, [B], ONE, [ONE], 2, name)),
        (ValueError, "needs 64 rows", lambda: gather(A, [B], ONE, [ONE], 1, name)),
        (TypeError, "B is None: give a tensor", lambda: scatter(A, None, ONE, ONE, "sum", 0, name)),
        (TypeError, "A_scale is None: give a tensor", lambda: gather(A, [B], None, [ONE], 0, name)),
        (TypeError, "bias of B is on meta", lambda: scatter(A, B, ONE, ONE, "sum", 0, name, bias=ONE.to("meta"))),
        (TypeError, "scale of B is on meta", lambda: scatter(A, B, ONE, ONE.to("meta"), "sum", 0, name)),
        (TypeError, "product is torch.float64", lambda: gather(A, [B], ONE, [ONE], 0, name, out_dtype=torch.float64)),
        # Errors that only torch can find are found by a product without rows.
        (ValueError, "_scaled_mm cannot", lambda: gather(A, [B], ONE, [ONE], 0, name, biases=[torch.ones(3)])),
        (ValueError, "_scaled_mm cannot", lambda: scatter(A, B, ONE, ONE, "sum", 0, name, bias=torch.ones(3))),
        (TypeError, "product is torch.float8_e5m2", lambda: scatter(A, B, ONE, ONE, "sum", 0, name, out_dtype=E5M2)),
        (ValueError, "size 3, which 2 ranks", lambda: scatter(A[:3], B, ONE, ONE, "sum", 0, name)),
        (ValueError, "reduce_op is 'max'", lambda: scatter(A, B, ONE, ONE, "max", 0, name)),
        (
            ValueError,
            r"output_shape \(3, 16\) does not match A of shape \(4, 32\)",
            lambda: ops.fused_scaled_matmul_reduce_scatter(
                A, B, ONE, ONE, "sum", 0, 0, name, [3, 16], out_dtype=torch.bfloat16
            ),
        ),
    ]
    for error, message, call in bad:
        with pytest.raises(error, match=message):
            call()
    gathers(me, "tensor", WAYS[:2])  # the group stays usable


def test_bad_arguments_are_rejected_before_any_communication(ranks: Pool) -> None:
    ranks.run(2, rejected)


def trials_of_equal_calls(me: Rank) -> None:
    """Count the products for trial in calls of one kind with new tensors, and in calls with one more kind of weight."""
    with mock.patch.object(scaled, "scaled_mm", wraps=scaled.scaled_mm) as tried:
        for columns, trials in ((37, 2), (39, 4)):
            for seed in range(3):
                A, B = float8(4, K, seed=seed), weight(K, columns, seed=seed)
                symm_overlap.all_gather_scaled_matmul(
                    A, [B, B], ONE, [ONE] * 2, 0, me.group, biases=[None, B[0].float()]
                )
                symm_overlap.scaled_matmul_reduce_scatter(A, B, ONE, ONE, "sum", 0, me.group)
            assert tried.call_count == trials


def test_torch_multiplies_for_trial_only_in_the_first_of_equal_calls(ranks: Pool) -> None:
    ranks.run(2, trials_of_equal_calls)
