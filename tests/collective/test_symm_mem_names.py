"""With `install_as_symm_mem`, torch's own ops run on CPU tensors, with the values and strides of torch's fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.collective.scaled_cases import float8, powers_of_two, rows_can_be_scaled, weight
from tests.ranks import Pool, Rank

ops = torch.ops.symm_mem


def torchs_ops(me: Rank, dtype: torch.dtype) -> None:
    """Call torch's ops as a program does. Only the first call is about this library."""
    symm_overlap.install_as_symm_mem()
    symm_overlap.install_as_symm_mem()  # a second call does nothing
    for dim in range(3):
        A = ref.binary((5, 3, 4), dtype, seed=me.rank)
        Bs = [ref.binary((4 * (me.world if dim == 2 else 1), n), dtype, seed=n) for n in (2, 7)]
        expected_A, expected = ref.torch_all_gather_matmul(A, Bs, dim, me)
        for return_A in (True, False):
            found_A, found = ops.fused_all_gather_matmul(A, Bs, dim, me.group_name, return_A=return_A)
            for product, value in zip(found, expected, strict=True):
                ref.same(product, value)
            if return_A:
                ref.same(found_A, expected_A)
            else:
                assert found_A is None
        shape = [5, 3, 4]
        shape[dim] *= me.world if dim < 2 else 1
        A, B = ref.binary(shape, dtype, seed=me.rank), ref.binary((4, 6 * me.world), dtype, seed=9)
        expected = ref.torch_matmul_reduce_scatter(A, B, "sum", dim, me)
        ref.same(ops.fused_matmul_reduce_scatter(A, B, "sum", dim, me.group_name), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchs_ops_run_on_cpu_tensors(ranks: Pool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, torchs_ops, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    ],
)
def test_every_call_of_torchs_op_is_one_of_ours(name: str) -> None:
    theirs, ours = (getattr(each, name).default._schema.arguments for each in (ops, torch.ops.symm_overlap))
    found = {argument.name: argument for argument in ours}
    positional = [argument.name for argument in ours if not argument.kwarg_only]
    for index, argument in enumerate(theirs):
        own = found.pop(argument.name)
        assert (str(own.type), own.kwarg_only) == (str(argument.type), argument.kwarg_only)
        assert argument.kwarg_only or positional[index] == argument.name
        assert own.has_default_value() == argument.has_default_value()
        assert own.default_value == argument.default_value
    assert all(added.has_default_value() for added in found.values())


def torchs_ops_with_bad_input(me: Rank) -> None:
    symm_overlap.install_as_symm_mem()
    with pytest.raises(ValueError, match=r"\(4, 5\).*\(4, 3\)"):
        ops.fused_all_gather_matmul(torch.ones(4, 3), [torch.ones(4, 5)], 0, me.group_name)
    torchs_ops(me, torch.float32)


def test_torchs_ops_raise_our_errors(ranks: Pool) -> None:
    ranks.run(2, torchs_ops_with_bad_input)


# --- float8


@contextmanager
def gloo_gathers_float8() -> Iterator[None]:
    """Let gloo gather float8 as bytes. It does not support float8, so torch's fallback would fail on it."""
    torchs = torch.ops._c10d_functional.all_gather_into_tensor

    def gather(tensor: Tensor, world: int, group_name: str) -> Tensor:
        return torchs(tensor.view(torch.uint8), world, group_name).view(tensor.dtype)

    with mock.patch.object(torch.ops._c10d_functional, "all_gather_into_tensor", gather):
        yield


SCALES = ["tensor", "rows of the shard", "gathered rows"]
LEAD = (16, 2)


def scaled_gather(me: Rank, dim: int, kind: str) -> None:
    symm_overlap.install_as_symm_mem()
    A = float8(*LEAD, 32, seed=me.rank)
    Bs = [weight(32, n, seed=n) for n in (16, 48)]
    lead = list(LEAD)
    lead[dim] *= me.world
    A_scale = {
        "tensor": torch.tensor(0.5),
        "rows of the shard": powers_of_two((*LEAD, 1), seed=me.rank),
        "gathered rows": powers_of_two((*lead, 1), seed=7),
    }[kind]
    per_row = kind != "tensor"
    B_scales = [powers_of_two((1, B.shape[1]), seed=8) if per_row else torch.tensor(2.0) for B in Bs]
    arguments = (A, Bs, A_scale, B_scales, dim, me.group_name)
    rest = ([None, None], [None, None], [torch.bfloat16, torch.float32], [False, False])
    if per_row:
        rest = ([None, None], [None, None], [torch.bfloat16, torch.bfloat16], [False, False])
    with gloo_gathers_float8():
        expected_A, expected = symm_mem._fused_all_gather_scaled_matmul_fallback(*arguments, *rest)
    found_A, found = ops.fused_all_gather_scaled_matmul(*arguments, *rest)
    ref.same(found_A.view(torch.uint8), expected_A.view(torch.uint8))
    for product, value in zip(found, expected, strict=True):
        assert product.dtype == value.dtype
        ref.same(product, value)
    assert found[0].any()


@pytest.mark.parametrize("dim", range(2))
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_scaled_gather_has_the_values_and_strides_of_torchs_fallback(
    ranks: Pool, world: int, kind: str, dim: int
) -> None:
    if kind != "tensor" and not rows_can_be_scaled():
        pytest.skip("in this torch, torch._scaled_mm on CPU accepts only one scale per tensor")
    ranks.run(world, scaled_gather, dim, kind)


def scaled_gather_of_columns(me: Rank) -> None:
    """torch's CUDA op supports the last dimension. Its fallback does not, so this test compares with plain PyTorch."""
    symm_overlap.install_as_symm_mem()
    A, B = float8(16, 32, seed=me.rank), weight(32 * me.world, 16, seed=3)
    one = torch.tensor(1.0)
    found_A, (found,) = ops.fused_all_gather_scaled_matmul(
        A, [B], one, [one], 1, me.group_name, [None], [None], [torch.float32], [False]
    )
    whole = torch.cat([float8(16, 32, seed=rank).float() for rank in range(me.world)], 1)
    torch.testing.assert_close(found_A.float(), whole, rtol=0, atol=0)
    torch.testing.assert_close(found, whole @ B.float(), rtol=0, atol=0)


def test_scaled_gather_along_the_contracted_dimension(ranks: Pool) -> None:
    ranks.run(2, scaled_gather_of_columns)


def scaled_scatter(me: Rank, dim: int, reduce_op: str, per_row: bool) -> None:
    symm_overlap.install_as_symm_mem()
    lead = [16, 6]
    A, B = float8(*lead, 32, seed=me.rank), weight(32, 48, seed=3)
    A_scale = powers_of_two((*lead, 1), seed=me.rank) if per_row else torch.tensor(float(me.world))
    B_scale = powers_of_two((1, 48), seed=8) if per_row else torch.tensor(2.0)
    arguments = (A, B, A_scale, B_scale, "sum", dim, min(dim, 1), me.group_name, [*lead, 48])
    expected = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*arguments, out_dtype=torch.bfloat16)
    arguments = (A, B, A_scale, B_scale, reduce_op, dim, min(dim, 1), me.group_name, [*lead, 48])
    found = ops.fused_scaled_matmul_reduce_scatter(*arguments, out_dtype=torch.bfloat16)
    ref.same(found, expected / (me.world if reduce_op == "avg" else 1))
    assert found.any()


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("world", [1, 2])
def test_scaled_scatter_has_the_values_and_strides_of_torchs_fallback(
    ranks: Pool, world: int, reduce_op: str, per_row: bool, dim: int
) -> None:
    if per_row and not rows_can_be_scaled():
        pytest.skip("in this torch, torch._scaled_mm on CPU accepts only one scale per tensor")
    ranks.run(world, scaled_scatter, dim, reduce_op, per_row)


def scaled_badly(me: Rank) -> None:
    symm_overlap.install_as_symm_mem()
    A, B, one, name = float8(16, 32), weight(32, 16), torch.tensor(1.0), me.group_name
    alone = ([None], [None], [None], [False])
    with pytest.raises(ValueError, match="biases has 2 entries and Bs has 1"):
        ops.fused_all_gather_scaled_matmul(A, [B], one, [one], 0, name, [None, None], *alone[1:])
    with pytest.raises(ValueError, match=r"\(16, 16\).*\(16, 32\).*needs 32 rows"):
        ops.fused_all_gather_scaled_matmul(A, [weight(16, 16)], one, [one], 0, name, *alone)
    for scale in (torch.ones(8, 1), torch.ones(16, 2)):
        with pytest.raises(ValueError, match=r"A_scale of shape .*\(32, 1\).*\(16, 1\)"):
            ops.fused_all_gather_scaled_matmul(A, [B], scale, [one], 0, name, *alone)
        with pytest.raises(ValueError, match=r"A_scale of shape .*\(16, 1\)"):
            ops.fused_scaled_matmul_reduce_scatter(A, B, scale, one, "sum", 0, 0, name, [16, 16])
    with pytest.raises(TypeError, match="float8"):
        ops.fused_scaled_matmul_reduce_scatter(A, B, one, one, "sum", 0, 0, name, [16, 16])
    scaled_gather(me, 0, "tensor")


def test_scaled_ops_raise_before_any_communication(ranks: Pool) -> None:
    ranks.run(2, scaled_badly)


# --- autocast


def in_autocast(me: Rank) -> None:
    symm_overlap.install_as_symm_mem()
    A, B = ref.binary((4, 3), torch.float32, seed=me.rank), ref.binary((3, 2), torch.float32, seed=9)
    with torch.autocast("cpu", torch.bfloat16):
        gathered, (product,) = ops.fused_all_gather_matmul(A, [B], 0, me.group_name)
        scattered = ops.fused_matmul_reduce_scatter(A, B, "sum", 0, me.group_name)
    assert [each.dtype for each in (gathered, product, scattered)] == [torch.float32] * 3


def test_autocast_leaves_torchs_ops_alone(ranks: Pool) -> None:
    ranks.run(2, in_autocast)
