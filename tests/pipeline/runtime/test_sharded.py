"""With FSDP2 or DDP inside a stage, gradients equal those of a plain module on all of the data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from symm_overlap.pipeline.runtime.stage import Stage
from tests.quick import one_in
from tests.ranks import Pool, Rank

WIDTH, MICROBATCHES = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)).double()


def sharded(how: str, group: dist.ProcessGroup) -> nn.Module:
    module, mesh = plain(), DeviceMesh.from_group(group, "cpu")
    for inner in module.modules():
        inner.recomputes = how == "recomputed"
    if how in ("ddp", "ddp_unused"):
        return DistributedDataParallel(module, process_group=group, find_unused_parameters=how == "ddp_unused")
    if how == "replicated_by_ddp":
        return replicate_by_ddp(module, process_group=group)
    if how == "replicated":
        return replicate(module, mesh=mesh)
    if how != "root":
        for inner in module:
            fully_shard(inner, mesh=mesh, reshard_after_forward=True)
    return module if how == "parts" else fully_shard(module, mesh=mesh)


def batch(rank: int, microbatch: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * rank + microbatch)
    x, grad = (torch.randn(4, WIDTH, dtype=torch.double, generator=random) for _ in range(2))
    return x.requires_grad_(), grad


def expected(rank: int, world: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of this rank's inputs, and the gradients of the parameters, averaged over the ranks."""
    module, inputs = plain(), []
    for other in range(world):
        for microbatch in range(MICROBATCHES):
            x, grad = batch(other, microbatch)
            module(x).backward(grad)
            inputs += [x.grad] if other == rank else []
    return inputs, [parameter.grad / world for parameter in module.parameters()]  # type: ignore[operator]


def whole(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad


def run(stage: Stage, order: str, rank: int, first: bool = False) -> list[Tensor | None]:
    """Run actions such as "F0 B0 R", and return the gradients of the inputs by microbatch.

    Args:
        stage, order, rank: the stage, its actions, and the rank on which they run.
        first: the inputs need no gradient, as in the first stage.
    """
    found: dict[str, tuple[Tensor | None, ...]] = {}
    for action in order.split():
        kind, number = action[0], action[1:]
        if kind == "U":
            stage.unshard()
        elif kind == "S":
            stage.reshard()
        elif kind == "R":
            stage.reduce_grad()
        else:
            x, grad = batch(rank, int(number))
            x.requires_grad_(not first)
            if kind == "F":
                stage.forward(int(number), (x,), {})
            elif kind == "W":
                stage.backward_weight(int(number))
            else:
                backward = stage.backward if kind == "B" else stage.backward_input
                found[number] = backward(int(number), [grad])
    return [gradient for number in sorted(found) for gradient in found[number]]


def gradients_are_right(me: Rank, how: str, order: str, first: bool = False, steps: int = 2) -> None:
    module = sharded(how, me.group)
    stage = Stage(module, 1)
    for _ in range(steps):
        inputs = run(stage, order, me.rank, first)
        wanted_inputs, wanted = expected(me.rank, me.world)
        wanted_inputs = [None] * MICROBATCHES if first else wanted_inputs
        torch.testing.assert_close(inputs, wanted_inputs, rtol=1e-12, atol=1e-12)
        found = [whole(parameter) for parameter in module.parameters()]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        module.zero_grad()


ORDERS = [
    "U F0 F1 F2 B0 B1 B2 S R",
    "U F0 F1 I0 F2 I1 W0 I2 W1 W2 S R",
    "U F0 F1 F2 S U I0 I1 I2 S U W0 W1 W2 R S",
    "F0 I0 F1 I1 F2 I2 S W0 W1 W2 R",
    "U F0 I0 W0 F1 B1 F2 I2 W2 R S",
]


HOW = ["root", "nested", "parts", "recomputed", "replicated", "ddp", "ddp_unused", "replicated_by_ddp"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("order", one_in(2, ORDERS))
def test_gradients_are_the_mean_over_the_ranks(ranks: Pool, how: str, order: str) -> None:
    ranks.run(2, gradients_are_right, how, order)


@pytest.mark.parametrize("how", ["root", "nested", "parts", "recomputed", "ddp"])
def test_gradients_of_the_first_stage_are_the_mean_over_the_ranks(ranks: Pool, how: str) -> None:
    ranks.run(2, gradients_are_right, how, ORDERS[1], True)


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def schedule_decides(me: Rank) -> None:
    module = sharded("nested", me.group)
    stage = Stage(module, 1)
    for steps, gathers, reduces, whole in [
        ("U F0 F1", 3, 0, True),
        ("I0 F2 B1 W0", 0, 0, True),
        ("S", 0, 0, False),
        ("U I2 W2", 3, 0, True),
        ("R", 0, 3, False),
    ]:
        with Collectives() as seen:
            run(stage, steps, me.rank)
        assert seen.counts == Counter(_allgather_base_=gathers, _reduce_scatter_base_=reduces), steps
        assert all(isinstance(parameter, DTensor) is not whole for parameter in module.parameters()), steps


def test_only_the_schedule_gathers_frees_and_reduces(ranks: Pool) -> None:
    ranks.run(2, schedule_decides)


def mixed(group: dist.ProcessGroup) -> FSDPModule:
    """Shard a module that computes in bfloat16, and adds up and reduces its gradients in float32."""
    # The last layer is left out. If the weight part runs a node that computed a module's output, FSDP itself adds up.
    module, mesh = plain().float()[:2], DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for inner in module:
        fully_shard(inner, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def adds_up_in_the_reduce_dtype(me: Rank) -> None:
    alone = mixed(me.group)
    batches = [[tensor.detach().float() for tensor in batch(me.rank, number)] for number in range(MICROBATCHES)]
    for number, (x, grad) in enumerate(batches):
        alone.set_requires_gradient_sync(number == MICROBATCHES - 1)
        alone(x.requires_grad_()).backward(grad)
    wanted = [whole(parameter) for parameter in alone.parameters()]
    piped = mixed(me.group)
    stage = Stage(piped, 1)
    for number, (x, _) in enumerate(batches):
        stage.forward(number, (x,), {})
    for number, (_, grad) in enumerate(batches):
        stage.backward_input(number, [grad])
    for number in range(MICROBATCHES):
        stage.backward_weight(number)
    stage.reduce_grad()
    found = [whole(parameter) for parameter in piped.parameters()]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_gradients_in_low_precision_add_up_as_without_a_pipeline(ranks: Pool) -> None:
    ranks.run(2, adds_up_in_the_reduce_dtype)


def starts_anew(me: Rank) -> None:
    module = sharded("nested", me.group)
    stage = Stage(module, 1)
    run(stage, "U F0 F1 B0 I1", me.rank)
    stage.clear()
    run(stage, "U F0 F1 F2 B0 B1 B2 S R", me.rank)
    found = [whole(parameter) for parameter in module.parameters()]
    torch.testing.assert_close(found, expected(me.rank, me.world)[1], rtol=1e-12, atol=1e-12)


def test_a_step_that_failed_leaves_no_gradients_behind(ranks: Pool) -> None:
    ranks.run(2, starts_anew)


def torch_loses_gradients(me: Rank) -> Any:
    """Count the parameters that torch's split backward finds in a module whose inner modules reshard after forward."""
    from torch.distributed.pipelining._backward import stage_backward_input

    module = sharded("nested", me.group)
    assert isinstance(module, FSDPModule)
    x, grad = batch(me.rank, 0)
    out = module(x)
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)
    _, groups = stage_backward_input([out], [grad], [x], module.parameters())
    return sum(len(group["params"]) for group in groups), len(list(module.parameters()))


def test_torch_itself_finds_no_parameters_that_were_freed_after_the_forward_pass(ranks: Pool) -> None:
    for found, there in ranks.run(2, torch_loses_gradients):
        assert found < there
