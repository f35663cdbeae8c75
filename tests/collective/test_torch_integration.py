"""The ops work with torch's opcheck, torch.compile and symbolic sizes, and accept a group in every form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.library import opcheck

import symm_overlap
from symm_overlap.collective.dispatch.direct_call import KERNELS
from tests.collective import reference as ref
from tests.quick import one_in
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[2:]


def samples(op: str, me: Rank, dtype: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments for every dimension of an op, and with inputs that are not contiguous."""
    name = me.group.group_name

    def tensor(*shape: int, seed: int = 0) -> Tensor:
        return ref.normal(shape, dtype, seed=me.rank + seed).requires_grad_()

    for dim in range(3):
        rows = 4 * (me.world if dim == 2 else 1)
        whole = [2, 3, 4]
        whole[dim] *= me.world
        product = [2, 3, 5]
        product[dim] *= me.world
        if op in ("fused_all_gather_matmul", "_fused_all_gather_matmul_save_shard"):
            for return_A in (True, False):
                yield (tensor(2, 3, 4), [tensor(rows, 5), tensor(rows, 2)], dim, name), {"return_A": return_A}
        elif op == "all_gather_weight_grad":
            lead = [2, 3]
            if dim < 2:
                lead[dim] *= me.world
            yield (tensor(2, 3, 4), [tensor(*lead, 5)], dim, name), {}
        elif op in ("fused_matmul_reduce_scatter", "fused_matmuls_reduce_scatter"):
            A, B = tensor(*product[:2], 4), tensor(4, product[2])
            if op == "fused_matmul_reduce_scatter":
                yield (A, B, ("sum", "avg")[dim % 2], dim, name), {}
            else:
                yield ([A, A], [B, B], tensor(*product), "sum", dim, name), {}
                if A.dtype in HALVES:
                    addend = tensor(*product).detach().float().requires_grad_(A.requires_grad)
                    yield ([A, A], [B, B], addend, "avg", dim, name), {"sum_dtype": torch.float32}
                    yield ([A], [B], None, "sum", dim, name), {"out_dtype": torch.float32}
        elif op == "fused_matmuls_all_reduce":
            As, Bs = [tensor(2, dim + 1, 4), tensor(2, dim + 1, 3)], [tensor(4, 5), tensor(3, 5)]
            yield (As, Bs, tensor(2, dim + 1, 5) if dim else None, ("sum", "avg")[dim % 2], name), {}
        elif op == "fused_matmuls_reduce_scatter_keep":
            As, Bs = [tensor(*product[:2], 4) for _ in range(2)], [tensor(4, product[2]) for _ in range(2)]
            for addend, keep, keep_sum in ((None, [1], False), (tensor(*product), [0, 1], True)):
                yield (As, Bs, addend, ("sum", "avg")[dim % 2], dim, name), {"keep": keep, "keep_sum": keep_sum}
        elif op == "fused_all_gather_weight_matmul":
            for transpose in (False, True):
                contracted = (5, 4)[transpose] * (me.world if dim % 2 == transpose else 1)
                yield (tensor(*[2, 3][:dim], contracted), tensor(5, 4), dim % 2, transpose, name), {}
        elif op == "weight_grad_reduce_scatter":
            yield (
                (tensor(*[2, 3][:dim], 4 * me.world), tensor(*[2, 3][:dim], 6), ("sum", "avg")[dim % 2], dim % 2, name),
                {},
            )
        elif op == "all_gather":
            yield (tensor(2, 3, 4), dim, name), {}
        elif op == "reduce_scatter":
            yield (tensor(*whole), "avg", dim, name), {}
    if op == "fused_matmul_all_reduce":
        yield (tensor(2, 3, 4), tensor(4, 5), "sum", name), {}
        yield (tensor(2, 3, 4), tensor(4, 5), "avg", name, tensor(5)), {}
    elif op == "all_reduce":
        yield (tensor(2, 3, 4), "avg", name), {}
    elif op == "fused_all_gather_matmul":
        turned = tensor(3, 2, 4).detach().transpose(0, 1).requires_grad_()
        yield (turned, [tensor(5, 4).detach().t().requires_grad_()], 0, name), {}


def opcheck_is_green(me: Rank, op: str) -> int:
    fully = 0
    for dtype in DTYPES:
        arguments = list(samples(op, me, dtype))
        for number, (args, kwargs) in enumerate(arguments):
            # opcheck's tests of autograd and tracing take most of the time and depend on no dtype. If there are two
            # samples for every dimension, these tests run for one of them, in turn.
            full = dtype == torch.float32 and (len(arguments) < 6 or number in (0, 3, 4))
            full = full or (dtype == torch.bfloat16 and number < 3 and "sum_dtype" in kwargs)
            fully += full
            chosen = {} if full else {"test_utils": ("test_schema", "test_faketensor")}
            opcheck(getattr(ops, op).default, args, kwargs, **chosen)
    return fully


OPS = dict.fromkeys(overload.overloadpacket.__name__ for overload in KERNELS)


@pytest.mark.parametrize(
    "op",
    one_in(2, [op for op in OPS if "scaled" not in op]),  # scaled ops: test_scaled_as_torch_ops.py
)
def test_opcheck_is_green_for_every_op_dimension_and_dtype(ranks: Pool, op: str) -> None:
    fully = ranks.run(2, opcheck_is_green, op, timeout=120)
    assert fully[0] >= (1 if "all_reduce" in op else 3)


def block(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, group: str) -> Tensor:
    """A feed-forward layer with tensor and sequence parallelism."""
    _, (u, g) = ops.fused_all_gather_matmul(x, [up, gate], 1, group, return_A=False)
    return ops.fused_matmul_reduce_scatter(u * torch.sigmoid(g), down, "sum", 1, group)


def compiled_equals_eager(me: Rank, backend: str) -> None:
    shapes = [(2, 4, 8), (8, 16), (8, 16), (16, 8)]
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for sequence in (4, 6):  # the second size must not be baked in
        shapes[0] = (2, sequence, 8)
        results = []
        for function in (block, compiled):
            inputs = [ref.normal(shape, torch.float64, me.rank + i).requires_grad_() for i, shape in enumerate(shapes)]
            y = function(*inputs, me.group.group_name)
            y.square().sum().backward()
            results.append([y.detach(), *(tensor.grad for tensor in inputs)])
        for eager, found in zip(*results, strict=True):
            assert found.stride() == eager.stride()
            torch.testing.assert_close(found, eager)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph_with_gradients_and_changing_sizes(ranks: Pool, backend: str) -> None:
    ranks.run(2, compiled_equals_eager, backend, timeout=180)


def fake_strides_are_the_real_ones(me: Rank) -> None:
    """Strides are most likely to be wrong for sizes of 1 and for dense but permuted inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    name = me.group.group_name
    for shape, dim in itertools.product([(1, 3, 4), (3, 1, 4), (1, 1, 4), (2, 3, 1), (2, 1, 3, 4), (4, 2)], range(3)):
        if dim >= len(shape):
            continue
        A = ref.normal(shape, torch.float32, me.rank)
        B = ref.normal((shape[-1] * (me.world if dim == len(shape) - 1 else 1), 5), torch.float32, 3)
        real_A, (real_Y,) = ops.fused_all_gather_matmul(A, [B], dim, name)
        with FakeTensorMode() as mode:
            fake_A, (fake_Y,) = ops.fused_all_gather_matmul(mode.from_tensor(A), [mode.from_tensor(B)], dim, name)
        assert (fake_A.shape, fake_A.stride()) == (real_A.shape, real_A.stride()), (shape, dim)
        assert (fake_Y.shape, fake_Y.stride()) == (real_Y.shape, real_Y.stride()), (shape, dim)
        expected_A, (expected_Y,) = ref.torch_all_gather_matmul(A, [B], dim, me)
        assert (expected_A.stride(), expected_Y.stride()) == (real_A.stride(), real_Y.stride()), (shape, dim)
        torch.testing.assert_close(real_A, expected_A, rtol=0, atol=0)
        torch.testing.assert_close(real_Y, expected_Y)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fake_strides_are_the_real_ones_and_those_of_torch(ranks: Pool, world: int) -> None:
    ranks.run(world, fake_strides_are_the_real_ones)


def every_way_to_name_a_group(me: Rank) -> None:
    mesh = DeviceMesh("cpu", torch.arange(me.world).view(1, me.world), mesh_dim_names=("dp", "tp"))
    A = ref.binary((2, 3), torch.float32, me.rank)
    expected = symm_overlap.all_gather(A, 0, me.group)
    assert expected.shape == (2 * me.world, 3)
    for group in (me.group.group_name, mesh["tp"], (mesh, "tp"), (mesh, 1)):
        torch.testing.assert_close(symm_overlap.all_gather(A, 0, group), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="2 dimensions"):
        symm_overlap.all_gather(A, 0, mesh)
    with pytest.raises(TypeError, match="int"):
        symm_overlap.all_gather(A, 0, 3)  # type: ignore[arg-type]


def test_a_group_may_be_a_name_a_process_group_or_a_mesh_dimension(ranks: Pool) -> None:
    ranks.run(5, every_way_to_name_a_group)


def within_the_rounding_of_the_dtype(me: Rank, dtype: torch.dtype) -> None:
    tolerance = ref.SHAPE[str(dtype).removeprefix("torch.")]
    As = [ref.normal((6 * me.world, 64), dtype, rank) for rank in range(me.world)]
    Bs = [ref.normal((64, 8), dtype, 50 + rank) for rank in range(me.world)]
    exact = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
    A, B = As[me.rank], Bs[me.rank]
    scattered = symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)
    assert ref.relative_error(scattered, exact.chunk(me.world)[me.rank]) < tolerance
    assert ref.relative_error(symm_overlap.matmul_all_reduce(A, B, "sum", me.group), exact) < tolerance
    _, (y,) = symm_overlap.all_gather_matmul(A, [B], 0, me.group)
    assert ref.relative_error(y, torch.cat(As).double() @ B.double()) < tolerance
    # Sums are accumulated in float32, so the sum of many partial sums is as accurate as that of two.
    many = symm_overlap.reduce_scatter(
        torch.full((me.world, 8), 1 + 2.0**-9, dtype=torch.float32).to(dtype), "sum", 0, me.group
    )
    single = torch.tensor(1 + 2.0**-9).to(dtype).double()
    assert torch.equal(many, (single * me.world).to(dtype).expand_as(many))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_values_are_within_the_rounding_of_the_dtype(ranks: Pool, dtype: torch.dtype) -> None:
    ranks.run(5, within_the_rounding_of_the_dtype, dtype)


def bits(me: Rank) -> list[Tensor]:
    A, B = ref.normal((4 * me.world, 33), torch.bfloat16, me.rank), ref.normal((33, 7), torch.bfloat16, 9)
    return [symm_overlap.matmul_all_reduce(A, B, "avg", me.group) for _ in range(5)]


def test_an_all_reduce_gives_the_same_bits_in_every_run_and_on_every_rank(ranks: Pool) -> None:
    results = ranks.run(4, bits)
    assert all(torch.equal(result, results[0][0]) for rank in results for result in rank)
