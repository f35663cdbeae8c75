"""DDP inside a stage: with options, with buffers, and around modules of a pipeline that has run before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, reference, squared
from tests.ranks import Pool, Rank

MICROBATCHES = 3


class Routed(nn.Module):
    """Has three layers. Both ranks use the first, rank 0 alone uses the second, and nobody uses the third."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y + self.layers[1](x) if self.rank == 0 else y


def rows(rank: int) -> Tensor:
    return torch.randn(2 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.double)


def mean_square(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()


def routed(rank: int) -> Routed:
    torch.manual_seed(0)
    return Routed(rank).double()


def unused_have_no_gradient(me: Rank) -> None:
    module = DistributedDataParallel(routed(me.rank), process_group=me.group, find_unused_parameters=True)
    stage = Stage(module, 0)
    alone = me.groups[(me.rank,)]
    runtime = PipelineRuntime(stage, "GPipe", microbatches=MICROBATCHES, loss=mean_square, group=alone)
    for _ in range(2):
        module.zero_grad()
        runtime.step(rows(me.rank), target=rows(me.rank))
    whole = routed(0)
    for rank in range(me.world):
        whole.rank = rank
        (whole(rows(rank)).square().mean() / me.world).backward()
    found = [layer.weight.grad for layer in module.module.layers]
    torch.testing.assert_close(found, [layer.weight.grad for layer in whole.layers], rtol=1e-12, atol=1e-12)
    assert found[2] is None


def test_ddp_that_finds_unused_parameters_leaves_them_without_a_gradient(fresh_ranks: type[Pool]) -> None:
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, unused_have_no_gradient)


def rejects_a_static_graph(me: Rank) -> None:
    module = DistributedDataParallel(routed(0), process_group=me.group, static_graph=True)
    alone = me.groups[(me.rank,)]
    runtime = PipelineRuntime(Stage(module, 0), "GPipe", microbatches=2, loss=mean_square, group=alone)
    with pytest.raises(ValueError, match="leave out static_graph=True"):
        runtime.step(rows(0)[:4], target=rows(0)[:4])


def test_ddp_with_a_static_graph_is_rejected(fresh_ranks: type[Pool]) -> None:
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, rejects_a_static_graph)


def buffers_are_broadcast(me: Rank) -> None:
    """The running mean is that of rank 0's rows, as with DDP alone, which broadcasts it before it is updated."""
    norms = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double() for _ in range(2)]
    norms[1].load_state_dict(norms[0].state_dict())
    module, plain = (DistributedDataParallel(each, process_group=me.group) for each in norms)
    alone = me.groups[(me.rank,)]
    runtime = PipelineRuntime(Stage(module, 0), "GPipe", microbatches=MICROBATCHES, loss=mean_square, group=alone)
    for _ in range(3):
        runtime.step(rows(me.rank), target=rows(me.rank))
        for number, part in enumerate(rows(me.rank).chunk(MICROBATCHES)):
            plain.require_backward_grad_sync = number == MICROBATCHES - 1
            (plain(part).square().mean() / MICROBATCHES).backward()
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for each in (module, plain):
            each.eval()(rows(me.rank))
    means = [torch.empty(4, dtype=torch.double) for _ in range(me.world)]
    torch.distributed.all_gather(means, module.module[1].running_mean, group=me.group)
    torch.testing.assert_close(means[0], means[1], rtol=0, atol=0)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_buffers_are_broadcast_as_by_ddp_alone(fresh_ranks: type[Pool]) -> None:
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, buffers_are_broadcast)


def wrapped_later(me: Rank) -> None:
    """Modules may be wrapped, or sharded, after an evaluation, and after a step."""
    mesh, alone = DeviceMesh.from_group(me.group, "cpu"), me.groups[(me.rank,)]
    for kind in ("DDP", "FSDP"):
        layers = [Layer(stage) for stage in range(2)]
        stages = [Stage(layer, index) for index, layer in enumerate(layers)]
        tied = [[(0, "linear.weight"), (1, "linear.weight")]]
        runtime = PipelineRuntime(stages, "ZBV", microbatches=4, loss=squared, group=alone, tied=tied)
        own = batch(4, me.rank)
        runtime.eval(own[0])
        runtime.step(own[0], target=own[1])
        for stage in stages:
            stage.module.zero_grad()
            if kind == "DDP":
                stage.module = DistributedDataParallel(stage.module, process_group=me.group)
            else:
                fully_shard(stage.module, mesh=mesh)
        whole = [Layer(stage) for stage in range(2)]
        whole[1].linear.weight = whole[0].linear.weight
        for _ in range(2):
            runtime.step(own[0], target=own[1])
            for rank in range(me.world):
                reference(list(whole), *batch(4, rank), 4)
        for found, expected in zip(layers, whole, strict=True):
            grads = {name: each.grad for name, each in found.named_parameters()}
            if kind == "FSDP":
                grads = {name: each.full_tensor() for name, each in grads.items()}
            wanted = {name: each.grad / me.world for name, each in expected.named_parameters()}
            assert_gradients(grads, wanted)


def test_modules_may_be_wrapped_or_sharded_after_a_step(fresh_ranks: type[Pool]) -> None:
    fresh_ranks(2, groups=[(0,), (1,)]).run(2, wrapped_later)
