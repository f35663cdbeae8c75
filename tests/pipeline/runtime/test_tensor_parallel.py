"""A stage of the package's own tensor-parallel layers can split its backward, with and without sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.flop_counter import FlopCounterMode

from symm_overlap.pipeline.runtime.stage import Stage
from tests.nn.blocks import HIDDEN, WIDTH, Block, block_plan
from tests.ranks import Pool, Rank


def local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def results(module: nn.Module, x: Tensor, grad: Tensor, steps: str) -> tuple[list[Tensor | None], list[int]]:
    """Return the gradients of the input and the parameters, and the FLOPs of every step."""
    module.zero_grad()
    stage, flops, found = Stage(module, 1), [], []
    stage.forward(0, (x,), {})
    for step in steps:
        with FlopCounterMode(display=False) as counter:
            if step == "W":
                stage.backward_weight(0)
            else:
                found += (stage.backward if step == "B" else stage.backward_input)(0, [grad])
        flops.append(counter.get_total_flops())
    return [local(tensor) for tensor in (*found, *(parameter.grad for parameter in module.parameters()))], flops


def parts_equal_the_whole(me: Rank, dim: int | None) -> Any:
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(me.group, "cpu")
    module = parallelize_module(Block().double(), mesh, block_plan(dim))
    random = torch.Generator().manual_seed(me.rank if dim is not None else 7)
    x, grad = (torch.randn(4, 6, WIDTH, dtype=torch.double, generator=random) for _ in range(2))
    whole, whole_flops = results(module, x.requires_grad_(), grad, "B")
    parts, parts_flops = results(module, x, grad, "IW")
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    assert all(tensor is not None for tensor in parts)
    return whole_flops, parts_flops


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dim", [1, None])
def test_the_parts_do_the_work_of_the_whole_once(ranks: Pool, world: int, dim: int | None) -> None:
    for (whole,), (inputs, weights) in ranks.run(world, parts_equal_the_whole, dim):
        assert inputs + weights == whole
        # All gradients of weights. If rows are sharded, each rank has 24 rows. Otherwise, there are 24 rows in all.
        every = 2 * 24 * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)
        assert weights == (every if dim is not None else every // world)
