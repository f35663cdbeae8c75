"""One gather for several linear layers: when a child takes its prepared product, and when it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from symm_overlap.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.nn.blocks import HIDDEN, WIDTH
from tests.nn.reference import WORLDS, equals_whole, values
from tests.ranks import Pool, Rank


class Three(nn.Module):
    """Three linear layers, and a way to call them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, HIDDEN) for _ in range(3))
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = WAYS[self.way](self, x)
        return y


def twice(module: Three, x: Tensor) -> Tensor:
    return module.a(x) * module.a(x) + module.b(x)


def another_input(module: Three, x: Tensor) -> Tensor:
    return module.a(x) + module.b(x + 1) * module.c(x.clone())


def in_place_before(module: Three, x: Tensor) -> Tensor:
    x.add_(1)
    return module.a(x) + module.b(x)


def no_gradient_through_one(module: Three, x: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = module.a(x)
    return module.b(x) * fixed


def unused(module: Three, x: Tensor) -> Tensor:
    return module.a(x)


def beside_the_input(module: Three, x: Tensor) -> Tensor:
    return module.down(torch.tanh(module.a(x)) * module.b(x)) + x.square()


def checkpointed(module: Three, x: Tensor) -> Tensor:
    inner = checkpoint(lambda x: torch.tanh(module.a(x)) * module.b(x), x, use_reentrant=False)
    return inner + module.c(x)


def reentrant(module: Three, x: Tensor) -> Tensor:
    inner = checkpoint(lambda x: torch.tanh(module.a(x)) * module.b(x), x, use_reentrant=True)
    return inner + module.c(x)


WAYS: dict[str, Callable[[Three, Tensor], Tensor]] = {
    way.__name__: way
    for way in (
        twice,
        another_input,
        in_place_before,
        no_gradient_through_one,
        unused,
        beside_the_input,
        checkpointed,
        reentrant,
    )
}


def three(me: Rank, way: str, input: Placement, local: bool = True) -> None:
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        column = ColwiseParallel()
        prepared = PrepareModuleInput(input_layouts=input, desired_input_layouts=Replicate(), use_local_output=local)
        plan = {"": prepared, "a": column, "b": column, "c": column, "down": RowwiseParallel()}
        return parallelize_module(module, mesh, plan)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x * 1)  # a leaf could not be written to

    output = Replicate() if way == "beside_the_input" else Shard(-1)
    equals_whole(me, Three(way).double(), parallelize, values((4, 8, WIDTH)), input, output, call)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_may_do_with_its_gathered_input_what_it_likes(ranks: Pool, world: int, way: str) -> None:
    for input in (Shard(1), Replicate()):
        ranks.run(world, three, way, input)
