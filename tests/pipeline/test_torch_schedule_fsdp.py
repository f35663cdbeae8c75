"""With FSDP2 inside torch's stages and a split backward, nested modules get the right gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from symm_overlap.pipeline import read_csv, torch_schedule
from symm_overlap.pipeline.lowering import lower
from tests.ranks import Rank

WIDTH, MICROBATCHES = 6, 2
SPLIT = read_csv("0F0,1F0,0F1,1F1,1I0,0I0,1I1,0I1,1W0,1W1,0W0,0W1")


def part(stage):
    """Return two modules, which FSDP2 shards one by one."""
    torch.manual_seed(stage)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))).double()


def batch(rank):
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(2 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def trains_sharded(me: Rank, schedule, frozen):
    """Each rank is a pipeline of its own, with its own data. The ranks share the parameters of both stages."""
    mesh, stages = DeviceMesh.from_group(me.group, "cpu"), []
    for index in range(2):
        module = part(index).requires_grad_(index not in frozen)
        for inner in module:
            fully_shard(inner, mesh=mesh, reshard_after_forward=True)
        stage = PipelineStage(fully_shard(module, mesh=mesh), index, 2, me.device, group=me.groups[(me.rank,)])
        stages.append(stage)
    runtime = torch_schedule(schedule, stages, nn.functional.mse_loss, split=True)
    x, target = batch(me.rank)
    runtime.step(x, target=target)
    whole = nn.Sequential(*(part(index).requires_grad_(index not in frozen) for index in range(2)))
    for rank in range(me.world):
        given, wanted = batch(rank)
        (nn.functional.mse_loss(whole(given), wanted) / me.world).backward()
    for stage, expected in zip(stages, whole, strict=True):
        for name, parameter in stage.submod.named_parameters():
            reference = expected.get_parameter(name).grad
            assert (parameter.grad is None) == (reference is None), name
            if reference is None:
                continue
            torch.testing.assert_close(parameter.grad.full_tensor(), reference, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("frozen", [(), (0,)])
@pytest.mark.parametrize("world", [2])
def test_a_split_backward_has_the_gradients_of_nested_modules(fresh_ranks, world, frozen):
    fresh_ranks(world, groups=[(rank,) for rank in range(world)]).run(world, trains_sharded, SPLIT, frozen)


@pytest.mark.parametrize("world", [2])
def test_a_table_without_waits_for_its_reductions_gets_them(fresh_ranks, world):
    fresh_ranks(world, groups=[(rank,) for rank in range(world)]).run(world, trains_sharded, lower(SPLIT), ())
