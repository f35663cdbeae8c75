"""Replicated modules inside torch's stages: `torch_schedule` trains them right, or says why torch would not."""

import re

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from symm_overlap.pipeline import read_csv, torch_schedule
from tests.pipeline.test_torch_schedule_fsdp import SPLIT, batch, part
from tests.ranks import Rank

WHOLE = read_csv("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1")
NEEDS_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 has no such module, or no split")


def replicated(how, index, me):
    """Return the module of a stage, replicated on all ranks in one of these ways."""
    module = part(index)
    if how == "by_fsdp":
        return replicate(module, mesh=DeviceMesh.from_group(me.group, "cpu"))
    if how == "by_ddp":
        return replicate_by_ddp(module, process_group=me.group)
    if how == "inside":
        return nn.Sequential(*(DistributedDataParallel(inner, process_group=me.group) for inner in module))
    group = me.groups[(me.rank,)] if how == "alone" else me.group
    return DistributedDataParallel(module, process_group=group, static_graph=how == "static")


def runtime_of(me, how, schedule, loss=nn.functional.mse_loss, **options):
    stages = [PipelineStage(replicated(how, i, me), i, 2, me.device, group=me.groups[(me.rank,)]) for i in range(2)]
    return torch_schedule(schedule, stages, loss, **options), stages


def trains(me: Rank, how, schedule, options):
    """Each rank is a pipeline of its own, with its own data. The ranks share the parameters of both stages."""
    runtime, stages = runtime_of(me, how, schedule, **options)
    x, target = batch(me.rank)
    runtime.step(x, target=target)
    whole = nn.Sequential(part(0), part(1))
    for rank in range(me.world):
        given, wanted = batch(rank)
        (nn.functional.mse_loss(whole(given), wanted) / me.world).backward()
    found = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    found = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]
    torch.testing.assert_close(found, [each.grad for each in whole.parameters()], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("how", "schedule", "options"),
    [
        pytest.param("by_fsdp", SPLIT, {"split": True}, marks=NEEDS_2_13),
        pytest.param("by_fsdp", WHOLE, {}, marks=NEEDS_2_13),
        ("ddp", WHOLE, {}),
        ("ddp", SPLIT, {"split": False}),
    ],
)
def test_replicated_modules_get_the_mean_of_the_gradients(fresh_ranks, how, schedule, options):
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, trains, how, schedule, options)


REJECTED = [
    ("ddp", SPLIT, "the schedule splits its backward: give split=False"),
    ("inside", WHOLE, "modules inside it are wrapped in DDP"),
    ("by_ddp", WHOLE, "`replicate` was applied to it: wrap it in DistributedDataParallel"),
    ("static", WHOLE, "DDP has static_graph=True: leave it out"),
]


def rejects(me: Rank):
    for how, schedule, why in REJECTED:
        with pytest.raises(ValueError, match=f"reduce gradients of stage 0, because {re.escape(why)}"):
            runtime_of(me, how, schedule, split=True)
        runtime_of(me, how, schedule, loss=None, split=True)  # without a backward there is nothing to reduce
    runtime_of(me, "alone", SPLIT, split=True)  # on a single rank there is nothing to reduce either


def test_ddp_that_torch_would_not_reduce_is_rejected(fresh_ranks):
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, rejects)
