"""torch's function transforms, FLOP counters and DTensors either work on the ops or are rejected with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.flop_counter import FlopCounterMode

import symm_overlap
from tests.ranks import Pool, Rank
from tests.transforms import comparing

ops = torch.ops.symm_overlap
Op = Callable[[Rank, Tensor], Any]

# Functions of one tensor of shape (4, 4), on each of two ranks.
CALLS: dict[str, Op] = {
    "all_gather_matmul": lambda me, A: symm_overlap.all_gather_matmul(A, [torch.ones(4, 6)], 0, me.group)[1][0],
    "all_gather_matmul weight": lambda me, B: symm_overlap.all_gather_matmul(torch.ones(4, 4), [B], 0, me.group)[1][0],
    "all_gather_weight_grad": lambda me, A: ops.all_gather_weight_grad(A, [torch.ones(8, 6)], 0, me.group_name)[0],
    "all_gather_weight_matmul": lambda me, W: symm_overlap.all_gather_weight_matmul(torch.ones(3, 8), W, 0, me.group),
    "weight_grad_reduce_scatter": lambda me, X: ops.weight_grad_reduce_scatter(
        X, torch.ones(4, 6), "sum", 0, me.group_name
    ),
    "matmul_reduce_scatter": lambda me, A: symm_overlap.matmul_reduce_scatter(A, torch.ones(4, 6), "sum", 0, me.group),
    "matmuls_reduce_scatter": lambda me, A: ops.fused_matmuls_reduce_scatter(
        [A, A], [torch.ones(4, 6)] * 2, torch.ones(4, 6), "sum", 0, me.group_name
    ),
    "matmuls_reduce_scatter_keep": lambda me, A: ops.fused_matmuls_reduce_scatter_keep(
        [A], [torch.ones(4, 6)], None, "sum", 0, me.group_name, keep=[0]
    )[1][0],
    "matmuls_all_reduce": lambda me, A: ops.fused_matmuls_all_reduce(
        [A, A], [torch.ones(4, 6)] * 2, torch.ones(4, 6), "sum", me.group_name
    ),
    "matmul_all_reduce": lambda me, A: symm_overlap.matmul_all_reduce(A, torch.ones(4, 6), "sum", me.group),
    "all_gather": lambda me, A: symm_overlap.all_gather(A, 0, me.group),
    "reduce_scatter": lambda me, A: symm_overlap.reduce_scatter(A, "sum", 0, me.group),
    "all_reduce": lambda me, A: symm_overlap.all_reduce(A, "sum", me.group),
    "op all_reduce": lambda me, A: ops.all_reduce(A, "sum", me.group_name),
}


def forward_mode(me: Rank, what: str) -> None:
    call, A = CALLS[what], torch.ones(4, 4)
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative \(torch.func.jvp\)"):
        torch.func.jvp(lambda x: call(me, x), (A,), (A,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, A)
        with pytest.raises(NotImplementedError, match="its derivative along a tangent is the op applied"):
            call(me, dual)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            call(me, dual)
        call(me, torch.ones(4, 4))  # a tensor without a tangent
    call(me, A)


@pytest.mark.parametrize("what", CALLS)
def test_forward_mode_is_refused_not_forgotten(ranks: Pool, what: str) -> None:
    ranks.run(2, forward_mode, what)


def vmap(me: Rank, what: str) -> None:
    call = CALLS[what]
    with pytest.raises(NotImplementedError, match=r"cannot be vmapped.*add the batch dimension to the tensors"):
        torch.func.vmap(lambda x: call(me, x))(torch.ones(2, 4, 4))
    call(me, torch.ones(4, 4))


@pytest.mark.parametrize("what", CALLS)
def test_vmap_is_refused_with_a_reason(ranks: Pool, what: str) -> None:
    ranks.run(2, vmap, what)


def gradients(me: Rank, what: str) -> None:
    call, A = CALLS[what], torch.ones(4, 4)
    said = r"no gradient inside torch\.func\.grad and torch\.func\.vjp: use backward\(\) or torch\.autograd\.grad"
    with pytest.raises(NotImplementedError, match=said):
        torch.func.grad(lambda x: call(me, x).sum())(A)
    with pytest.raises(NotImplementedError, match=said):
        torch.func.vjp(lambda x: call(me, x), A)
    # A call that does not depend on the differentiated input needs no gradient, so it works.
    assert torch.func.grad(lambda x: (x * call(me, A).sum()).sum())(A).shape == (4, 4)
    call(me, A)


@pytest.mark.parametrize("what", CALLS)
def test_gradients_of_functions_are_refused_with_a_reason(ranks: Pool, what: str) -> None:
    ranks.run(2, gradients, what)


def dtensors(me: Rank, what: str) -> None:
    mesh = DeviceMesh.from_group(me.group, "cpu")
    A = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])
    for grad in (False, True):
        with comparing(False), pytest.raises(TypeError, match=r"got a DTensor: pass tensor\.to_local\(\)"):
            CALLS[what](me, A.detach().requires_grad_(grad))
    CALLS[what](me, A.to_local())


@pytest.mark.parametrize("what", CALLS)
def test_a_dtensor_is_refused_and_to_local_is_named(ranks: Pool, what: str) -> None:
    ranks.run(2, dtensors, what)


M, K, N = 4, 6, 10  # of one rank
WORLD = 2


def flops(me: Rank) -> dict[str, tuple[int, int]]:
    """Return, by op, the counted FLOP and the FLOP of plain PyTorch's matmuls on this rank."""
    A, B, wide, tall = torch.ones(2, M, K), torch.ones(K, N), torch.ones(K * WORLD, N), torch.ones(2 * WORLD, M, K)
    gathered, grad = torch.ones(2 * WORLD, M, K), torch.ones(2 * WORLD, M, N)
    name = me.group_name
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_gather_matmul": (
            lambda: ops.fused_all_gather_matmul(A, [B, B[:, :3]], 0, name),
            lambda: (gathered @ B, gathered @ B[:, :3]),
        ),
        "all_gather_matmul save=shard": (
            lambda: symm_overlap.all_gather_matmul(A, [B], 0, me.group, save="shard"),
            lambda: gathered @ B,
        ),
        "all_gather_matmul, last dimension": (
            lambda: ops.fused_all_gather_matmul(A, [wide], 2, name, return_A=False),
            lambda: torch.ones(2, M, K * WORLD) @ wide,
        ),
        "all_gather_weight_grad": (
            lambda: ops.all_gather_weight_grad(A, [grad, grad[..., :3]], 0, name),
            lambda: [gathered.flatten(0, 1).t() @ each.flatten(0, 1) for each in (grad, grad[..., :3])],
        ),
        "all_gather_weight_grad, last dimension": (
            lambda: ops.all_gather_weight_grad(A, [grad[:2]], 2, name),
            lambda: torch.ones(K * WORLD, 2 * M) @ torch.ones(2 * M, N),
        ),
        "all_gather_weight_matmul": (
            lambda: ops.fused_all_gather_weight_matmul(A, B, 1, False, name),
            lambda: A @ torch.ones(K, N * WORLD),
        ),
        "weight_grad_reduce_scatter": (
            lambda: ops.weight_grad_reduce_scatter(gathered, grad, "sum", 0, name),
            lambda: gathered.flatten(0, 1).t() @ grad.flatten(0, 1),
        ),
        "matmul_reduce_scatter": (
            lambda: ops.fused_matmul_reduce_scatter(tall, B, "sum", 0, name),
            lambda: tall @ B,
        ),
        "matmuls_reduce_scatter": (
            lambda: ops.fused_matmuls_reduce_scatter([tall, tall], [B, B], None, "sum", 0, name),
            lambda: (tall @ B, tall @ B),
        ),
        "matmuls_reduce_scatter_keep": (
            lambda: ops.fused_matmuls_reduce_scatter_keep([tall] * 2, [B] * 2, None, "sum", 0, name, keep=[1]),
            lambda: (tall @ B, tall @ B),
        ),
        "matmul_all_reduce": (lambda: ops.fused_matmul_all_reduce(A, B, "sum", name), lambda: A @ B),
        "matmuls_all_reduce": (
            lambda: ops.fused_matmuls_all_reduce([A, A], [B, B], None, "sum", name),
            lambda: (A @ B, A @ B),
        ),
        "all_gather": (lambda: ops.all_gather(A, 0, name), lambda: None),
    }
    return {what: (counted(ours), counted(plain)) for what, (ours, plain) in calls.items()}


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flop_counters_count_an_op_as_the_matmuls_of_plain_pytorch(ranks: Pool) -> None:
    for found in ranks.run(WORLD, flops):
        assert {what: ours for what, (ours, _) in found.items()} == {what: plain for what, (_, plain) in found.items()}
        assert all(ours for what, (ours, _) in found.items() if what != "all_gather")
