"""DTensors pass from module to module, also from stage to stage, as the parts of the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

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


class Mean(nn.Module):
    def forward(self, result: Tensor) -> Tensor:
        mean = result.square().mean()
        return mean.redistribute(placements=[Replicate()]) if isinstance(mean, DTensor) else mean


class WithLoss(Decoder):
    """It returns its loss, which is a DTensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Mean()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.mean(super().forward(x))}


class CrossEntropy(nn.Module):
    def forward(self, result: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(result.flatten(0, 1), target.flatten())


class WithCrossEntropy(Decoder):
    """Its module for the loss gets a DTensor beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = CrossEntropy()

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(super().forward(x), target)}


class Twice(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) * 2)


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class Passing(Decoder):
    """It passes a parameter of one module to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scaled(self.norm(x), self.norm.weight))


class Raising(nn.Module):
    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, result: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("an odd length")
        return result


class Ending(Decoder):
    """Its head gives a DTensor to a last module, which may raise."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        super().__init__()
        self.last = Raising(error)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


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


def assert_gradients(pipe: PipelineModel, expected: nn.Module) -> None:
    parameters = dict(expected.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), parameters[name].grad, **EXACT, msg=name)


def pipelined(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: dict[str, ParallelStyle] = PLAN,
    own_loss: bool = False,
    **choices: Any,
) -> PipelineModel:
    parallelize_module(model, mesh["tensor"], plan)
    group, loss = mesh.get_group("pipeline"), None if own_loss else loss_of
    return PipelineModel(model, layer_names="layers.*", num_microbatches=2, loss=loss, group=group, **choices)


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
    assert_gradients(pipe, expected)
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


def return_a_loss(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    torch.manual_seed(0)
    model = WithLoss().double()
    expected = copy.deepcopy(model)
    x = reals(4, 6, WIDTH)
    own = x.chunk(2, 1)[me.rank].contiguous()
    pipe = pipelined(model, mesh, own_loss=True).build(x=own)
    loss, wanted = pipe.run_train(x=own), expected(x)["loss"]
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), **EXACT)
    assert_gradients(pipe, expected)


def test_a_loss_may_be_a_dtensor(two_ranks: Pool) -> None:
    two_ranks.run(2, return_a_loss)


def parallel_loss(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    torch.manual_seed(0)
    model = WithCrossEntropy().double()
    expected = copy.deepcopy(model)
    x, target = reals(4, 6, WIDTH), torch.arange(24).view(4, 6) % 6
    own = x.chunk(2, 1)[me.rank].contiguous()
    with loss_parallel():
        pipe = pipelined(model, mesh, own_loss=True).build(x=own, target=target)
        loss = pipe.run_train(x=own, target=target)
        evaluated = pipe.run_eval(x=own, target=target)["loss"]
    wanted = expected(x, target)["loss"]
    wanted.backward()
    for each in (loss, evaluated):
        torch.testing.assert_close(whole(each), wanted.detach(), **EXACT)
    assert_gradients(pipe, expected)


def test_a_module_may_compute_the_loss_of_a_dtensor_and_a_tensor(two_ranks: Pool) -> None:
    two_ranks.run(2, parallel_loss)


def refused(me: Rank, kind: type[Decoder]) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    head = RowwiseParallel(input_layouts=Shard(1), output_layouts=Partial(), use_local_output=False)
    plan = {**PLAN, "head": head} if kind is Ending else PLAN  # every rank has a part of a sum
    with pytest.raises(TraceError) as caught:
        pipelined(kind().double(), mesh, plan).build(x=reals(4, 3, WIDTH), target=reals(4, 6, 6))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (Twice, ["self.head(self.norm(x) * 2)", "let the module return a tensor (use_local_output=True)"]),
        (Passing, ["gives scaled (Scaled) a DTensor that none of its modules has returned"]),
        (Ending, ["head (Linear) returns a DTensor of partial sums"]),
    ],
)
def test_dtensors_that_stages_cannot_pass_on_are_refused(
    two_ranks: Pool, kind: type[Decoder], messages: list[str]
) -> None:
    for found in two_ranks.run(2, refused, kind):
        for message in messages:
            assert message in found


def raise_inside(me: Rank, error: type[Exception]) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "tensor"))
    with pytest.raises(TraceError) as caught:
        pipelined(Ending(error).double(), mesh).build(x=reals(4, 3, WIDTH), target=reals(4, 6, 6))
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "ending"),
    [(ValueError, "ValueError: an odd length"), (RuntimeError, "calls the layers one after another as they are")],
)
def test_an_error_inside_of_a_module_is_not_put_down_to_dtensors(
    two_ranks: Pool, error: type[Exception], ending: str
) -> None:
    for found in two_ranks.run(2, raise_inside, error):
        assert f"{error.__name__}: an odd length" in found
        assert found.endswith(ending)
        assert "use_local_output" not in found


def from_a_whole_state_dict(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (1, me.world), mesh_dim_names=("pp", "tp"))
    values = Decoder().double().state_dict()
    with torch.device("meta"):
        model = Decoder().double()
    parallelize_module(model, mesh["tp"], PLAN)
    pipe = PipelineModel(model, group=mesh.get_group("pp"), num_microbatches=2, state_dict=values, device="cpu")
    pipe.build(x=reals(4, me.world, WIDTH))
    for name, parameter in pipe.named_parameters():
        assert torch.equal(whole(parameter.detach()), values[name]), name


def test_sharded_parameters_get_their_parts_of_a_whole_state_dict(two_ranks: Pool) -> None:
    two_ranks.run(2, from_a_whole_state_dict)
