"""Train torchao's float8 layers with its tensor-parallel styles, compiled with the pass and without it, and compare.

::

    torchrun --nproc-per-node 2 -m tests.inductor.torchao_float8

It needs the package torchao (0.18). The model is two SwiGLU blocks with sequence parallelism, in float32 on CPU, with
one scale for each tensor. Everything but the pass is torch's and torchao's. gloo does not support float8, so without
the pass such tensors are gathered as bytes.

The command prints how many collectives beside a matmul were fused, and the largest relative difference of the output
and of the gradients. It fails if not all were fused, or if the difference is more than rounding.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.fx import Graph, Node

import symm_overlap.inductor
from symm_overlap.inductor._torch import CustomGraphPass

WIDTH, HIDDEN, BATCH, LENGTH, BLOCKS = 64, 128, 2, 32, 2
SITES = 4 * BLOCKS  # a gather and a reduction for each block, forward and backward
BOUND = 1e-5


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.feed_forward(self.norm(x))
        return y


class GatherAsBytes(CustomGraphPass):
    """Gathers float8 tensors as bytes."""

    def __call__(self, graph: Graph) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default:
                self._as_bytes(graph, node)

    def _as_bytes(self, graph: Graph, node: Node) -> None:
        shard: Any = node.args[0]
        dtype = shard.meta["val"].dtype
        if not dtype.is_floating_point or dtype.itemsize > 1:
            return
        (wait,) = node.users
        for each in (node, wait):
            each.meta["val"] = each.meta["val"].view(torch.uint8)
        with graph.inserting_before(node):
            shard_bytes = graph.call_function(torch.ops.aten.view.dtype, (shard, torch.uint8))
            shard_bytes.meta["val"] = shard.meta["val"].view(torch.uint8)
        node.update_arg(0, shard_bytes)
        with graph.inserting_after(wait):
            gathered = graph.call_function(torch.ops.aten.view.dtype, (wait, dtype))
            gathered.meta["val"] = wait.meta["val"].view(dtype)
        wait.replace_all_uses_with(gathered, delete_user_cb=lambda user: user is not gathered)

    def uuid(self) -> str:
        """Return the part of a cached graph's key that stands for this pass."""
        return "gather as bytes"


def parallel_model(mesh: DeviceMesh) -> nn.Module:
    """Return the model with torchao's layers and styles."""
    float8 = importlib.import_module("torchao.float8")
    styles = importlib.import_module("torchao.float8.float8_tensor_parallel")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name("tensorwise"))
    plan = {
        "norm": SequenceParallel(),
        "feed_forward": styles.PrepareFloat8ModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.gate": styles.Float8ColwiseParallel(),
        "feed_forward.up": styles.Float8ColwiseParallel(),
        "feed_forward.down": styles.Float8RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in model.children():
        parallelize_module(block, mesh, plan)
    return model


def step(model: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """Return this rank's output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    y = run(x).to_local()
    y.square().sum().backward()
    assert x.grad is not None
    grads = [parameter.grad for parameter in model.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in (y.detach(), x.grad, *grads)]


def main() -> str:
    """Run both, and return what is wrong, or an empty string."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    local = torch.randn(BATCH, LENGTH // world, WIDTH, generator=torch.Generator().manual_seed(rank))
    x = DTensor.from_local(local, mesh, [Shard(1)])
    model = parallel_model(mesh)
    found = []
    for options in ({"post_grad_custom_pre_pass": GatherAsBytes()}, symm_overlap.inductor.options()):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        found.append(step(one, torch.compile(one, options=options), x))
    difference = max(
        float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) for one, other in zip(*found, strict=True)
    )
    report = symm_overlap.inductor.report()
    if rank == 0:
        print(f"fused: {report.fused} of {SITES}; largest relative difference: {difference:.1e}", flush=True)
    dist.destroy_process_group()
    if report.fused != SITES:
        return f"{report.fused} of {SITES} collectives beside a matmul were fused:\n{report}"
    return "" if difference <= BOUND else f"the relative difference is {difference}, allowed is {BOUND}"


if __name__ == "__main__":
    sys.exit(main() or 0)
