"""Parallel styles in eager mode: a parallelized model computes the same as the whole model, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import symm_overlap.nn
from symm_overlap.nn import ColwiseParallel, PrepareModuleInputOutput, RowwiseParallel
from tests.nn.blocks import MLP, WIDTH, SwiGLU, mlp_plan
from tests.nn.reference import EXACT, WORLDS, equals_whole, gradients, mesh_of, values, weighted
from tests.ranks import Pool, Rank
from tests.transforms import choices


def mlp(me: Rank, input: Placement, output: Placement, bias: bool) -> None:
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(module, mesh, mlp_plan(input, output))

    equals_whole(me, MLP(bias).double(), parallelize, values((4, 8, WIDTH)), input, output)


LAYOUTS = [Replicate(), Shard(0), Shard(1), Shard(-1)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_column_and_row(ranks: Pool, world: int, bias: bool) -> None:
    for layout in LAYOUTS:
        ranks.run(world, mlp, layout, layout, bias)
    ranks.run(world, mlp, Shard(1), Replicate(), bias)
    ranks.run(world, mlp, Replicate(), Shard(0), bias)


def summed(me: Rank, bias: bool) -> None:
    """Compare with torch's style if the ranks sum a row-parallel output later: values, placements and gradients."""
    mesh, results = mesh_of(me), []
    for library in (symm_overlap.nn, torch.distributed.tensor.parallel):
        for local in (True, False):
            torch.manual_seed(0)
            row = library.RowwiseParallel(output_layouts=Partial(), use_local_output=local)
            model = MLP(bias).double()
            parallelize_module(model, mesh, {"up": library.ColwiseParallel(), "down": row})
            x = values((4, WIDTH)).requires_grad_()
            y = model(x)
            assert isinstance(y, DTensor) is not local
            part = y.to_local() if isinstance(y, DTensor) else y
            weighted(part, values((4, WIDTH), 9)).backward()
            results.append([part.detach(), x.grad, *(gradient for _, gradient in gradients(model))])
    assert all(torch.equal(one, other) for one, other in zip(results[0], results[1], strict=True))
    for found, expected in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_row_parallel_output_may_be_left_unsummed(ranks: Pool, world: int, bias: bool) -> None:
    ranks.run(world, summed, bias)


def experts(me: Rank) -> list[str]:
    """A module whose inputs and outputs have the layouts of torchtitan's mixtures of experts. Return the ops called."""
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        around = PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Partial(),),
            desired_output_layouts=(Shard(1),),
        )
        column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Partial())
        return parallelize_module(module, mesh, {"": around, "gate": column, "up": column, "down": row})

    with choices() as calls:
        equals_whole(me, SwiGLU().double(), parallelize, values((2, 8, WIDTH)), Shard(1), Shard(1), times=1)
    return [op for op, _ in calls]


@pytest.mark.parametrize("world", WORLDS)
def test_a_module_whose_output_is_summed_by_its_style_shares_its_gather(ranks: Pool, world: int) -> None:
    calls = ranks.run(world, experts)[0]
    # Forward: one gather, one sum of the output. Backward: the gradient of the output is gathered, those of the bias
    # and of the input are summed, and those of the weights share a gather.
    forward, backward = ["all_gather_matmul", "reduce_scatter"], ["all_reduce", "matmul_reduce_scatter"]
    assert calls == [*forward, "all_gather", *backward, "all_gather_matmul"]
