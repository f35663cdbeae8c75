"""DTensors pass from module to module, also from stage to stage, as the parts of the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from symm_overlap.pipeline.model import PipelineModel, TraceError
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT
from tests.ranks import Pool, Rank


class Decoder(nn.Module):
    """A model whose plan is that of Llama's end: the last norm hands a DTensor to the head, which returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Twice(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) * 2)


PLAN: dict[str, ParallelStyle] = {
    # The second part of a layer gives its DTensor to the next layer, or to the norm.
    "layers.*.0": RowwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
    "layers.*.1": SequenceParallel(),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    """Ranks of their own, since a mesh makes groups."""
    with Pool(2) as pool:
        yield pool


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    assert isinstance(result, DTensor)
    return mean_square(whole(result), target)


def pipelined(model: nn.Module, mesh: DeviceMesh, **choices: Any) -> PipelineModel:
    parallelize_module(model, mesh["tensor"], PLAN)
    group = mesh.get_group("pipeline")
    return PipelineModel(model, layer_names="layers.*", num_microbatches=2, loss=loss_of, group=group, **choices)


def train(me: Rank, schedule: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (me.world // 2, 2), mesh_dim_names=("pipeline", "tensor"))
    torch.manual_seed(0)
    model = Decoder().double()
    expected = copy.deepcopy(model)
    x, target = reals(4, 6, WIDTH), reals(4, 6, 6, seed=1)
    own = x.chunk(2, 1)[mesh["tensor"].get_local_rank()].contiguous()
    pipe = pipelined(model, mesh, schedule=schedule, stages_per_rank=2).build(x=own, target=target)
    loss = pipe.run_train(x=own, target=target)
    wanted = mean_square(expected(x), target)
    wanted.backward()
    if loss is not None:
        torch.testing.assert_close(loss, wanted.detach(), **EXACT)
    parameters = dict(expected.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), parameters[name].grad, **EXACT, msg=name)
    result = pipe.run_eval(x=own)
    if result is not None:
        assert isinstance(result, DTensor)
        torch.testing.assert_close(result.full_tensor(), expected(x).detach(), **EXACT)
    return [stage.module is not None for stage in pipe.stages]


def test_dtensors_pass_from_layer_to_layer_and_to_the_loss(two_ranks: Pool) -> None:
    assert two_ranks.run(2, train, "Interleaved1F1B") == [[True, True]] * 2


@pytest.mark.slow
def test_dtensors_pass_from_rank_to_rank(fresh_ranks: Any) -> None:
    assert fresh_ranks(4).run(4, train, "ZBV", timeout=120) == [[True, True]] * 4


def compute_between_modules(me: Rank) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    with pytest.raises(TraceError) as caught:
        pipelined(Twice().double(), mesh).build(x=reals(4, 3, WIDTH), target=reals(4, 6, 6))
    return str(caught.value)


def test_a_model_that_computes_with_a_dtensor_is_refused(two_ranks: Pool) -> None:
    for message in two_ranks.run(2, compute_between_modules):
        assert "self.head(self.norm(x) * 2)" in message
        assert "let the module return a tensor (use_local_output=True)" in message
