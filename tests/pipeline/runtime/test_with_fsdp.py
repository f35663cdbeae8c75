"""Two pipelines of two ranks each: with FSDP2 in every stage, or with tensor-parallel layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.ranks import Pool, Rank

PIPELINES = ((0, 1), (2, 3))
REPLICAS = ((0, 2), (1, 3))


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Pool]:
    """Four ranks as two pipelines."""
    with Pool(4, groups=[*PIPELINES, *REPLICAS]) as pool:
        yield pool


def of(me: Rank, groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return next(group for group in groups if me.rank in group)


def two_layers(stage: int) -> nn.Sequential:
    return nn.Sequential(Layer(2 * stage), Layer(2 * stage + 1))


def trains(me: Rank, name: str, transport: str, nested: bool) -> None:
    pipeline, replicas = of(me, PIPELINES), of(me, REPLICAS)
    schedule = generate(name, ranks=2, microbatches=4)
    mesh = DeviceMesh.from_group(me.groups[replicas], "cpu")
    mine = {stage: two_layers(stage) for stage in schedule.stages_of_ranks[pipeline.index(me.rank)]}
    for module in mine.values():
        for layer in module if nested else ():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh)
    runtime = PipelineRuntime(
        [Stage(module, index) for index, module in mine.items()],
        schedule,
        group=me.groups[pipeline],
        loss=squared,
        transport=transport,
    )
    whole = [[two_layers(stage) for stage in range(schedule.stages)] for _ in replicas]
    of_whole: list[Tensor] = []
    for step in range(3):
        each = [
            reference(whole[r], *batch(4, 10 * step + r), 4)[2] for r in range(2)
        ]  # every data-parallel rank has its own batch
        x, target = batch(4, 10 * step + replicas.index(me.rank))
        runtime.step(x, target=target)
        for stage, module in mine.items():
            wanted = {n: (each[0][stage][n] + each[1][stage][n]) / 2 for n in each[0][stage]}  # type: ignore[operator]
            found = {n: None if g is None else g.full_tensor() for n, g in gradients(module).items()}  # type: ignore[attr-defined]
            assert_gradients(found, wanted)
    for stage in range(schedule.stages):
        of_whole += [(a + b) / 2 for a, b in zip(each[0][stage].values(), each[1][stage].values(), strict=True)]  # type: ignore[operator]
    before = {stage: gradients(module) for stage, module in mine.items()}
    norm = runtime.clip_grad_norm_(0.25)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(of_whole), rtol=1e-11, atol=0.0)
    for stage, module in mine.items():
        for name, gradient in gradients(module).items():
            torch.testing.assert_close(gradient, before[stage][name] * (0.25 / (norm + 1e-6)), rtol=1e-11, atol=0.0)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "transport", "nested"),
    [
        ("1F1B", "symmetric", True),
        ("ZB-H1", "symmetric", False),
        ("ZBVZeroBubble", "symmetric", True),
        ("ZBV", "c10d", True),
    ],
)
def test_gradients_are_the_mean_over_the_data_parallel_ranks(
    four_ranks: Pool, name: str, transport: str, nested: bool
) -> None:
    four_ranks.run(4, trains, name, transport, nested)


def clips_tensor_parallel_stages(me: Rank, transport: str) -> None:
    """The linear layers' gradients are DTensors. Those of the norms are not, and are the same on both ranks.

    What stages send to each other is the result of a functional collective for which nobody has waited yet.
    """
    pipeline, peers = of(me, PIPELINES), of(me, REPLICAS)
    mesh, stage = DeviceMesh.from_group(me.groups[peers], "cpu"), pipeline.index(me.rank)
    torch.manual_seed(0)
    linear = [[nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)] for _ in range(2)]
    whole = [nn.Sequential(nn.LayerNorm(4), *linear[0]).double(), nn.Sequential(*linear[1], nn.LayerNorm(4)).double()]
    module = parallelize_module(
        copy.deepcopy(whole[stage]), mesh, {str(1 - stage): ColwiseParallel(), str(3 - stage): RowwiseParallel()}
    )
    runtime = PipelineRuntime(
        Stage(module, stage), "1F1B", microbatches=4, group=me.groups[pipeline], loss=squared, transport=transport
    )
    x, target = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    for foreach in (None, False, True):
        nn.ModuleList([module, *whole]).zero_grad()
        runtime.step(x, target=target)
        reference(list(whole), x, target, 4)
        expected = nn.utils.clip_grad_norm_(nn.ModuleList(whole).parameters(), 0.01)
        norm = runtime.clip_grad_norm_(0.01, foreach=foreach)
        torch.testing.assert_close(norm, expected, rtol=1e-11, atol=0.0)
        for name, wanted in gradients(whole[stage]).items():
            found = module.get_parameter(name).grad
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transport", ["symmetric", "c10d"])
def test_gradients_of_tensor_parallel_layers_are_clipped_with_all_others(four_ranks: Pool, transport: str) -> None:
    four_ranks.run(4, clips_tensor_parallel_stages, transport)
