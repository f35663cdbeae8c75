"""Scaled matmuls of float8 numbers, in layouts and sizes that GPUs support, are exact on every path."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

import symm_overlap
from tests.collective.scaled_cases import E4M3, E5M2, bits, powers_of_two, rows_can_be_scaled
from tests.gpu.conditions import PATHS, Path, on_path
from tests.gpu.conftest import Worlds
from tests.gpu.test_values import difference, zeros_and_ones
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

K, COLUMNS = 64, (32, 16)  # GPUs require multiples of 16
LEADS = [(4, 16), (3, 5)]  # chunks that begin at multiples of 16 rows, and chunks that begin anywhere


def float8(shape: tuple[int, ...], seed: int, dtype: torch.dtype = E4M3) -> Tensor:
    return zeros_and_ones(shape, torch.float32, seed, K).to(dtype)


def weight(rows: int, columns: int, seed: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Return a column-major weight, as GPUs require it."""
    return float8((columns, rows), seed, dtype).t()


def scale(per_row: bool, shape: tuple[int, ...], seed: int) -> Tensor:
    return powers_of_two(shape, seed) if per_row else torch.tensor(0.5)


def product(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, bias: Tensor | None) -> Tensor:
    found = (A.double() @ B.double()) * A_scale.double() * B_scale.double()
    return found if bias is None else found + bias.double()


def gathers(me: Rank, path: Path, per_row: bool) -> None:
    problems = []
    dtypes = itertools.cycle([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
    for lead, dim, out in itertools.product(LEADS, (0, 1, 2), (torch.bfloat16, torch.float32)):
        if per_row and (dim == 2 or out != torch.bfloat16):
            continue
        A_dtype, B_dtype = (E4M3, E4M3) if per_row else next(dtypes)
        shards = [float8((*lead, K), rank, A_dtype) for rank in range(me.world)]
        own = [scale(per_row, (*lead, 1), rank) for rank in range(me.world)]
        whole = torch.cat([shard.float() for shard in shards], dim)
        Bs = [weight(whole.shape[2], n, n, B_dtype) for n in COLUMNS]
        B_scales = [scale(per_row, (1, n), n) for n in COLUMNS]
        biases = [torch.arange(float(COLUMNS[0])).bfloat16() if out == torch.bfloat16 and not per_row else None, None]
        A_scale = torch.cat(own, dim) if per_row else own[0]
        with on_path(path):
            A, found = symm_overlap.all_gather_scaled_matmul(
                shards[me.rank].to(me.device),
                [B.to(me.device) for B in Bs],
                own[me.rank].to(me.device),
                [each.to(me.device) for each in B_scales],
                dim,
                me.group,
                biases=[None if bias is None else bias.to(me.device) for bias in biases],
                out_dtype=out,
            )
        assert A is not None
        torch.testing.assert_close(bits(A.cpu()), bits(whole.to(A_dtype)), rtol=0, atol=0)
        for one, B, B_scale, bias in zip(found, Bs, B_scales, biases, strict=True):
            assert one.dtype == out
            if text := difference(one.cpu(), product(whole, B, A_scale, B_scale, bias)):
                problems.append(f"rows {lead}, dim {dim}, {A_dtype}, {B_dtype}, {out}, N {B.shape[1]}: {text}")
    assert not problems, "\n".join(problems)


def scatters(me: Rank, path: Path, per_row: bool) -> None:
    problems = []
    for lead, dim, reduce_op in itertools.product(LEADS, (0, 1, 2), ("sum", "avg")):
        rows = [size * (me.world if index == dim else 1) for index, size in enumerate(lead)]
        columns = COLUMNS[0] * (me.world if dim == 2 else 1)
        As = [float8((*rows, K), rank) for rank in range(me.world)]
        B, A_scale = weight(K, columns, 9), scale(per_row, (*rows, 1), 3)
        B_scale = scale(per_row, (1, columns), 4)
        total = sum(product(A, B, A_scale, B_scale, None) for A in As)
        with on_path(path):
            found = symm_overlap.scaled_matmul_reduce_scatter(
                As[me.rank].to(me.device),
                B.to(me.device),
                A_scale.to(me.device),
                B_scale.to(me.device),
                reduce_op,
                dim,
                me.group,
            )
        assert isinstance(total, Tensor)
        wanted = total.chunk(me.world, dim)[me.rank] / (me.world if reduce_op == "avg" else 1)
        if text := difference(found.cpu(), wanted):
            problems.append(f"rows {lead}, dim {dim}, {reduce_op}: {text}")
    assert not problems, "\n".join(problems)


# All versions of torch support a scale for each row on GPUs, but not all of them support it on CPU.
NEEDS_ROW_SCALES = pytest.mark.skipif(
    not torch.cuda.is_available() and not rows_can_be_scaled(), reason="torch supports only one scale a tensor here"
)
BY_ROW = pytest.mark.parametrize("per_row", [False, pytest.param(True, marks=NEEDS_ROW_SCALES)], ids=["tensor", "rows"])


@BY_ROW
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_gathered_rows(gpu_ranks: Worlds, path: Path, per_row: bool) -> None:
    gpu_ranks.run(2, gathers, path, per_row)


@BY_ROW
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_scattered_sums(gpu_ranks: Worlds, path: Path, per_row: bool) -> None:
    gpu_ranks.run(2, scatters, path, per_row)


def test_four_ranks(gpu_ranks: Worlds) -> None:
    for function in (gathers, scatters):
        gpu_ranks.run(4, function, ("pipelined", 2, 2), False)


def rejected(me: Rank) -> None:
    """What only cuBLAS rejects, and only if there are rows, is an error ahead of communication."""
    A, number = float8((16, K), me.rank).to(me.device), torch.tensor(0.5, device=me.device)
    good = weight(K, 32, 1).to(me.device)
    row_major = torch.empty(K, 32, dtype=E4M3, device=me.device).copy_(good)

    def scattered(B: Tensor) -> Tensor:
        scales = number, number
        return symm_overlap.scaled_matmul_reduce_scatter(A, B, *scales, "sum", 0, me.group, out_dtype=torch.bfloat16)

    def rejects() -> pytest.RaisesExc[ValueError]:
        return pytest.raises(ValueError, match=r"torch\._scaled_mm cannot multiply these tensors")

    for B, out in ((row_major, torch.bfloat16), (good, E5M2)):
        with rejects():
            symm_overlap.all_gather_scaled_matmul(A, [B], number, [number], 0, me.group, out_dtype=out)
    with rejects():
        scattered(row_major)
    one = number.cpu()
    total = sum(product(float8((16, K), rank), good.cpu(), one, one, None) for rank in range(me.world))
    assert isinstance(total, Tensor)
    assert not difference(scattered(good).cpu(), total.chunk(me.world)[me.rank])


@pytest.mark.gpu
def test_a_product_that_the_library_rejects_is_an_error_ahead_of_communication(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, rejected)


def in_turn(me: Rank, path: Path) -> None:
    """Matrices of equal shapes, as large as those for which compiled kernels are launched without Triton on a GPU."""
    interpreted = me.device.type != "cuda" or "SYMM_OVERLAP_HOST_GPU" in os.environ
    size, problems = 32 if interpreted else 512, []
    one, outs = torch.ones(()), (torch.bfloat16, torch.float32, torch.float16)
    cases = list(itertools.product((E4M3, E5M2), (E4M3, E5M2), outs, (False, True)))
    for index, (A_dtype, B_dtype, out, fast) in enumerate(2 * cases):
        if A_dtype == B_dtype == E5M2:
            continue  # no GPU multiplies them
        As = [zeros_and_ones((size, size), torch.float32, index + rank, size).to(A_dtype) for rank in range(me.world)]
        B = zeros_and_ones((size, size), torch.float32, index, size).to(B_dtype).t()
        mine, weight, scale = As[me.rank].to(me.device), B.to(me.device), one.to(me.device)
        with on_path(path):
            _, (gathered,) = symm_overlap.all_gather_scaled_matmul(
                mine, [weight], scale, [scale], 0, me.group, out_dtype=out, use_fast_accum=fast, return_A=False
            )
            summed = symm_overlap.scaled_matmul_reduce_scatter(
                mine, weight, scale, scale, "sum", 0, me.group, out_dtype=out, use_fast_accum=fast
            )
        products = [product(A, B, one, one, None) for A in As]
        total = torch.stack(products).sum(0).chunk(me.world)[me.rank]
        for what, found, wanted in (("gather", gathered, torch.cat(products)), ("sum", summed, total)):
            if text := difference(found.cpu(), wanted):
                problems.append(f"{what} of {A_dtype}, {B_dtype}, {out}, fast {fast}: {text}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_equal_shapes_of_other_dtypes_in_turn(gpu_ranks: Worlds, path: Path) -> None:
    gpu_ranks.run(2, in_turn, path)
