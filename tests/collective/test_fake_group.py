"""On a fake process group, which has no peers, every op returns the shapes and strides of a real call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import symm_overlap
from tests.quick import one_in
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap
PATHS = [None, "sequential", "pipelined", "c10d"]
Form = tuple[tuple[int, ...], tuple[int, ...]]


def keep(name: str, world: int, new: Callable[..., Tensor], dim: int) -> Any:
    lead, columns = [world if d == dim else 2 for d in range(2)], world if dim == 2 else 3
    As, Bs = [new(*lead, 4) for _ in range(2)], [new(4, columns) for _ in range(2)]
    return ops.fused_matmuls_reduce_scatter_keep(As, Bs, None, "sum", dim, name, keep=[1], keep_sum=True)


def half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16()


# Each function gets the group's name, its size and a function that creates tensors, and returns the outputs.
CALLS: dict[str, Callable[[str, int, Callable[..., Tensor]], Any]] = {
    **{
        f"all_gather_matmul dim {dim}": lambda name, world, new, dim=dim: ops.fused_all_gather_matmul(
            new(2, 3, 4), [new(4 * (world if dim == 2 else 1), n) for n in (5, 1)], dim, name
        )
        for dim in range(3)
    },
    **{
        f"matmul_reduce_scatter dim {dim}": lambda name, world, new, dim=dim: ops.fused_matmul_reduce_scatter(
            new(*(world if d == dim else 2 for d in range(2)), 4), new(4, world if dim == 2 else 3), "avg", dim, name
        )
        for dim in range(3)
    },
    "all_gather_matmul without A": lambda name, world, new: ops.fused_all_gather_matmul(
        new(2, 3, 4), [new(4, 5)], 1, name, return_A=False
    )[1],
    "all_gather_weight_grad": lambda name, world, new: ops.all_gather_weight_grad(
        new(2, 4), [new(2 * world, 3)], 0, name
    ),
    **{
        f"all_gather_weight_matmul dim {dim} {transpose=}": lambda name, world, new, dim=dim, transpose=transpose: (
            ops.fused_all_gather_weight_matmul(
                new(2, 3, (5, 4)[transpose] * (world if dim == transpose else 1)), new(5, 4), dim, transpose, name
            )
        )
        for dim in range(2)
        for transpose in (False, True)
    },
    "weight_grad_reduce_scatter": lambda name, world, new: ops.weight_grad_reduce_scatter(
        new(2, 3, 4), new(2, 3, 5 * world), "avg", 1, name
    ),
    "matmuls_reduce_scatter": lambda name, world, new: ops.fused_matmuls_reduce_scatter(
        [new(world, 4), new(world, 4)], [new(4, 3), new(4, 3)], new(world, 3), "sum", 0, name
    ),
    "matmuls_reduce_scatter, added in float32": lambda name, world, new: ops.fused_matmuls_reduce_scatter(
        [half(new(world, 4))] * 2, [half(new(4, 3))] * 2, new(world, 3).float(), "sum", 0, name, sum_dtype=torch.float32
    ),
    "matmuls_reduce_scatter to float32": lambda name, world, new: ops.fused_matmuls_reduce_scatter(
        [half(new(world, 4))], [half(new(4, 3))], None, "sum", 0, name, out_dtype=torch.float32
    ),
    "reduce_scatter to float32": lambda name, world, new: ops.reduce_scatter(
        half(new(2, 3 * world)), "avg", 1, name, out_dtype=torch.float32
    ),
    **{
        f"matmuls_reduce_scatter_keep dim {dim}": lambda name, world, new, dim=dim: keep(name, world, new, dim)
        for dim in range(3)
    },
    "matmul_all_reduce": lambda name, world, new: ops.fused_matmul_all_reduce(new(3, 4), new(4, 5), "sum", name),
    "matmul_all_reduce with a bias": lambda name, world, new: ops.fused_matmul_all_reduce(
        new(2, 3, 4), new(4, 5), "avg", name, new(5)
    ),
    "matmuls_all_reduce": lambda name, world, new: ops.fused_matmuls_all_reduce(
        [new(2, 3, 4), new(2, 3, 2)], [new(4, 5), new(2, 5)], new(2, 3, 5), "sum", name, [new(5), new(5)]
    ),
    "all_gather_matmul with biases": lambda name, world, new: ops.fused_all_gather_matmul(
        new(2, 4), [new(4, 5), new(4, 3)], 0, name, [new(5), new(3)]
    ),
    "matmul_reduce_scatter with a bias": lambda name, world, new: ops.fused_matmul_reduce_scatter(
        new(2, world, 4), new(4, 5), "avg", 1, name, new(5)
    ),
    "matmuls_reduce_scatter with biases": lambda name, world, new: ops.fused_matmuls_reduce_scatter(
        [new(world, 4), new(world, 4)], [new(4, 3), new(4, 3)], None, "sum", 0, name, [new(3), new(3)]
    ),
    "all_gather": lambda name, world, new: ops.all_gather(new(2, 3), 1, name),
    "reduce_scatter": lambda name, world, new: ops.reduce_scatter(new(2, 3 * world), "sum", 1, name),
    "all_reduce": lambda name, world, new: ops.all_reduce(new(2, 3), "avg", name),
}


def forms(call: Callable[..., Any], name: str, world: int, path: str | None) -> list[Form]:
    """Return the sizes and strides of the outputs of a call and of the gradients of its inputs."""
    inputs: list[Tensor] = []

    def new(*shape: int) -> Tensor:
        inputs.append(torch.ones(shape, requires_grad=True))
        return inputs[-1]

    with symm_overlap.force_path(path):
        found = call(name, world, new)
        outputs = [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, Tensor)]
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return [
        (tuple(each.shape), each.stride())
        for each in [*outputs, *(each.grad for each in inputs if each.grad is not None)]
    ]


def all_forms(name: str, world: int, path: str | None) -> dict[str, list[Form]]:
    return {what: forms(call, name, world, path) for what, call in CALLS.items()}


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def real_forms(me: Rank, path: str | None) -> dict[str, list[Form]]:
    return all_forms(me.group_name, me.world, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world", [2, 3])
def test_sizes_and_strides_are_those_of_real_ranks(ranks: Pool, world: int, path: str | None) -> None:
    expected = ranks.run(world, real_forms, path)[0]
    with fake_group(world) as name:
        assert all_forms(name, world, path) == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("world", "rank"), one_in(2, [(1000, 500), (2, 1), (8, 7)]))
def test_fake_tensors_agree_with_real_ones_in_worlds_of_any_size(world: int, rank: int, path: str | None) -> None:
    with fake_group(world, rank) as name:
        real = all_forms(name, world, path)
        with FakeTensorMode():
            assert all_forms(name, world, path) == real


@pytest.mark.parametrize("rank", [0, 2])
def test_a_gather_finds_the_own_shard_in_every_place(rank: int) -> None:
    """On a fake group, the local shard takes the place of every peer's shard."""
    with fake_group(3, rank) as name:
        A = torch.arange(8.0).view(2, 4)
        gathered, (product,) = ops.fused_all_gather_matmul(A, [2 * torch.eye(4)], 0, name)
    assert torch.equal(gathered, torch.cat([A] * 3))
    assert torch.equal(product, 2 * gathered)


@pytest.mark.parametrize("path", PATHS)
def test_what_a_rank_keeps_of_its_own_products_is_real(path: str | None) -> None:
    """On a fake group, kept products have the values of this rank's own inputs."""
    with fake_group(3, 1) as name, symm_overlap.force_path(path):
        A, B = torch.arange(24.0).view(6, 4), torch.arange(8.0).view(4, 2)
        output, (product,), _ = ops.fused_matmuls_reduce_scatter_keep([A], [B], None, "sum", 0, name, keep=[0])
    assert torch.equal(product, A @ B)
    assert torch.equal(output, (A @ B)[2:4])


def test_prepare_has_nothing_to_do() -> None:
    with fake_group(8) as name, symm_overlap.prepare():
        forms(CALLS["all_reduce"], name, 8, None)


def test_bad_input_is_refused_as_on_a_real_group() -> None:
    with fake_group(8) as name, pytest.raises(ValueError, match="size 3, which 8 ranks cannot share"):
        ops.reduce_scatter(torch.ones(3), "sum", 0, name)
