"""Modules stay unchanged: their hooks run, and tensor parallelism and FSDP inside of them continue to work."""

from __future__ import annotations

import abc
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColwiseParallel, RowwiseParallel
from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import WIDTH, make, mean_square, reals
from tests.pipeline.model.reference import EXACT, whole_step
from tests.ranks import Pool, Rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.shift = nn.Parameter(torch.ones(WIDTH))  # it is in no module that is called, but FSDP shards it

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Blocks().double(), {"x": reals(8, 4), "target": reals(8, 3, seed=1)}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def require_loaded(pipe: PipelineModel, whole: nn.Module, batch: dict[str, Any]) -> None:
    """The values of the whole model must get into parameters that are sharded."""
    pipe.build(**batch)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load_state_dict(whole.state_dict())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(full(parameter), whole.get_parameter(name)), name
    with pytest.raises(RuntimeError, match=r"size mismatch for \S+.bias"):
        pipe.load_state_dict({name: value[:1] for name, value in whole.state_dict().items()})


def check(pipe: PipelineModel, whole: nn.Module, batch: dict[str, Any]) -> None:
    """One step must have the loss and gradients of the whole model. Ranks may have only parts of the parameters."""
    require_loaded(pipe, whole, batch)
    loss, expected = pipe.run_train(**batch), whole_step(whole, batch, {"loss": mean_square}, 4)
    if loss is not None:
        torch.testing.assert_close(loss, expected, **EXACT)
    parameters = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(full(parameter.grad), parameters[name].grad, **EXACT, msg=name)
    found = pipe.run_eval(x=batch["x"])
    if found is not None:
        torch.testing.assert_close(found, whole(batch["x"]).detach(), **EXACT)


def with_tensor_parallelism(me: Rank) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    found = []
    for schedule in ("1F1B", "ZBVZeroBubble"):
        model, batch = blocks()
        whole = copy.deepcopy(model)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        pipe = PipelineModel(
            model, Block, num_microbatches=4, schedule=schedule, loss=mean_square, group=mesh.get_group("pipeline")
        )
        check(pipe, whole, batch)
        found.append(any(isinstance(parameter, DTensor) for parameter in pipe.parameters()))
    return found


@pytest.mark.slow
def test_tensor_parallelism_inside_of_layers_goes_on_working(fresh_ranks: Any) -> None:
    assert fresh_ranks(4).run(4, with_tensor_parallelism, timeout=120) == [[True, True]] * 4


def with_fsdp(me: Rank) -> bool:
    model, batch = blocks()
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    pipe = PipelineModel(model, Block, num_microbatches=4, loss=mean_square, group=mesh.get_group("pipeline"))
    pipe.build(**batch)
    for stage in pipe.stages:
        for module in list(stage.module.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
        fully_shard(stage.module, mesh=mesh["data"], reshard_after_forward=False)
    check(pipe, whole, batch)
    return all(isinstance(parameter, DTensor) for parameter in pipe.parameters())


def test_fsdp_shards_the_parameters_of_a_part(fresh_ranks: Any) -> None:
    assert fresh_ranks(4).run(4, with_fsdp, timeout=120) == [True] * 4


def with_hooks(me: Rank) -> list[str]:
    model, batch, options = make("mlp", 4)
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    pipe = PipelineModel(model, num_microbatches=2, partition="even", group=me.group, **options).build(**batch)
    pipe.run_train(**batch)
    seen.clear()
    pipe.run_train(**batch)
    return seen


def test_hooks_of_modules_run_for_every_microbatch(ranks: Pool) -> None:
    first, last = ranks.run(2, with_hooks)
    layers = [[f"blocks.{layer}.0", f"blocks.{layer}.1", f"blocks.{layer}"] for layer in range(4)]
    assert first == 2 * ["embed", *layers[0], *layers[1]]
    assert last == 2 * [*layers[2], *layers[3], "head"]


class Named(Block):
    """As models of Hugging Face that look up by the names of their class what to return."""

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self)
        assert (kind.__name__, kind.__qualname__, kind.__module__, str(kind)) == NAMES
        return super().forward(x)


NAMES = Named.__name__, Named.__qualname__, Named.__module__, str(Named)


def with_names(me: Rank) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Named() for _ in range(4))).double(), {"input": reals(8, WIDTH)}
    whole = copy.deepcopy(model)
    pipe = PipelineModel(model, Named, num_microbatches=2, loss=lambda y: y.mean(), target=None, group=me.group)
    loss, expected = pipe.run_train(**batch), whole(**batch).mean()
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach(), **EXACT)


def test_classes_of_modules_have_their_names_while_a_model_is_traced(ranks: Pool) -> None:
    ranks.run(2, with_names)


REGISTERED: dict[str, type[nn.Module]] = {}


class Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], *, kind: str) -> None:
        assert kind == "registered"
        REGISTERED[name] = cls
        super().__init__(name, bases, names)

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], *, kind: str) -> Meta:
        return super().__new__(cls, name, bases, names)


class Registered(Block, metaclass=Meta, kind="registered"):
    """A class that is registered when it is made, that nothing may be derived from, and whose instances are frozen. Its
    forward looks at its exact class."""

    def __init__(self) -> None:
        super().__init__()
        self.is_frozen = True

    def __init_subclass__(cls, *, kind: str) -> None:
        raise TypeError("Registered is final")

    def __setattr__(self, name: str, value: Any) -> None:
        assert not vars(self).get("is_frozen")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self) is REGISTERED["Registered"]
        return super(self.__class__, self).forward(x)


class WithoutDict:
    __slots__ = ()


class Mixed(WithoutDict, Block):
    """A class whose instances have another layout than those of torch.nn.Module."""


class Abstract(Block, abc.ABC):
    pass


def with_classes_of_their_own_kind(me: Rank) -> None:
    torch.manual_seed(0)
    kinds = (Registered, Mixed, Abstract, Registered)
    model, batch = nn.Sequential(*(kind() for kind in kinds)).double(), {"input": reals(8, WIDTH)}
    whole = copy.deepcopy(model)
    pipe = PipelineModel(model, Block, num_microbatches=2, loss=lambda y: y.mean(), target=None, group=me.group)
    loss, expected = pipe.run_train(**batch), whole(**batch).mean()
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach(), **EXACT)
    assert {"Registered": Registered} == REGISTERED
    assert all(type(module) in kinds for stage in pipe.stages for module in stage.module.children())


def test_classes_may_refuse_to_be_derived_from(ranks: Pool) -> None:
    ranks.run(2, with_classes_of_their_own_kind)


def with_compiled_stages(me: Rank) -> None:
    model, batch = blocks()
    whole = copy.deepcopy(model)
    pipe = PipelineModel(model, Block, num_microbatches=4, loss=mean_square, group=me.group).build(**batch)
    for stage in pipe.stages:
        stage.module.compile(backend="eager", fullgraph=True)
    check(pipe, whole, batch)


def test_stages_can_be_compiled_each_as_one_graph(ranks: Pool) -> None:
    ranks.run(2, with_compiled_stages, timeout=120)
