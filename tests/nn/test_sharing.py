"""One gather for several linear layers: when a child uses its product that was prepared, and when it must not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from symm_overlap.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from symm_overlap.nn.offer import _records
from tests.nn.blocks import HIDDEN, WIDTH
from tests.nn.blocks import whole as whole_input
from tests.nn.reference import WORLDS, equals_whole, mesh_of, values
from tests.ranks import Pool, Rank
from tests.transforms import choices


class Three(nn.Module):
    """Three linear layers that share an input, and a way to call them."""

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


def another_weight(module: Three, x: Tensor) -> Tensor:
    doubled = torch.func.functional_call(module.a, {"weight": module.a.weight * 2}, (x,))
    return doubled * module.b(x)


def swapped_weights(module: Three, x: Tensor) -> Tensor:
    module.a.weight, module.b.weight = module.b.weight, module.a.weight
    y = torch.tanh(module.a(x)) * module.b(x).sin()
    module.a.weight, module.b.weight = module.b.weight, module.a.weight
    return y


def unused(module: Three, x: Tensor) -> Tensor:
    return module.a(x)


def beside_the_input(module: Three, x: Tensor) -> Tensor:
    return module.down(torch.tanh(module.a(x)) * module.b(x)) + x.square()


def written_to_between(module: Three, x: Tensor) -> Tensor:
    """torch cannot differentiate this, because a linear layer keeps its input. A gathered input is not kept."""
    y = module.a(x)
    x = x.add_(1) if isinstance(module.a.weight, DTensor) else x + 1
    return y * module.b(x)


def checkpointed(module: Three, x: Tensor) -> Tensor:
    inner = checkpoint(lambda x: torch.tanh(module.a(x)) * module.b(x), x, use_reentrant=False)
    return inner + module.c(x)


def reentrant(module: Three, x: Tensor) -> Tensor:
    inner = checkpoint(lambda x: torch.tanh(module.a(x)) * module.b(x), x, use_reentrant=True)
    return inner + module.c(x)


def as_one_batch_of_rows(module: Three, x: Tensor) -> Tensor:
    """Take views that only contiguous tensors have, as many models do."""
    a, b = module.a(x), module.b(x)
    inner = torch.tanh(a.view(-1, a.shape[-1])) * b.view(-1, b.shape[-1])
    return module.down(inner).view(x.shape) + x.view(-1, WIDTH).square().view(x.shape)


def writes_to_the_output(module: Three, x: Tensor) -> Tensor:
    first = module.a(x).relu_()
    return first + module.a(x) * module.b(x)


def writes_to_one_of_two(module: Three, x: Tensor) -> Tensor:
    first, second = module.a(x), module.a(x)
    return first.relu_() + second * module.b(x)


def scales_the_gradient(module: Three, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.1)
    return module.a(x) * module.b(x)


def freezes_one(module: Three, x: Tensor) -> Tensor:
    module.a.requires_grad_(False)
    y = module.a(x)
    module.a.requires_grad_(True)
    return y * module.b(x)


def writes_to_parts_of_weights(module: Three, x: Tensor) -> Tensor:
    with torch.no_grad():
        for parameter in (module.a.weight, module.b.bias):
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(1.5)
    return module.a(x) * module.b(x)


WAYS: dict[str, Callable[[Three, Tensor], Tensor]] = {
    way.__name__: way
    for way in (
        twice,
        another_input,
        in_place_before,
        written_to_between,
        no_gradient_through_one,
        unused,
        beside_the_input,
        checkpointed,
        reentrant,
        as_one_batch_of_rows,
        another_weight,
        swapped_weights,
        writes_to_the_output,
        writes_to_one_of_two,
        scales_the_gradient,
        freezes_one,
        writes_to_parts_of_weights,
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
        return module(x * 1)  # not a leaf, because leaves cannot be written to in place

    output = Replicate() if way in ("beside_the_input", "as_one_batch_of_rows") else Shard(-1)
    equals_whole(me, Three(way).double(), parallelize, values((4, 8, WIDTH)), input, output, call)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_may_do_with_its_gathered_input_what_it_likes(ranks: Pool, world: int, way: str) -> None:
    """Whatever a module does with its gathered input, results and gradients are those of the whole model."""
    ranks.run(world, three, way, Shard(1))
    if way != "written_to_between":
        ranks.run(world, three, way, Replicate())


class Failing(nn.Module):
    """Raises an exception, whose traceback refers to the input, or calls its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, HIDDEN)
        self.fail = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise KeyError("stop")
        y: Tensor = self.a(x)
        return y


def nothing_is_kept(me: Rank) -> None:
    whole = Failing().double()
    module = parallelize_module(whole, mesh_of(me), {"": whole_input(1), "a": ColwiseParallel()})
    alive: list[weakref.ref[Tensor]] = []
    module.a.register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0])))
    module.a.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    x = values((2, 4, WIDTH)).requires_grad_()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            module(x)
        assert not _records.of
        module.fail = False
        y = module(x)
        assert not _records.of
        assert len(alive) == 2
        del y
        assert not [one for one in alive if one() is not None], "tensors are freed without the garbage collector"
    finally:
        gc.enable()


def test_nothing_is_kept_after_a_call_and_after_an_exception(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(world, nothing_is_kept)


def named(me: Rank) -> list[str]:
    """Only the layers named in ``linears`` receive a product. The others compute theirs from the gathered input."""
    torch.manual_seed(0)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        prepared = PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(1)},
            desired_input_kwarg_layouts={"x": Replicate()},
            use_local_output=True,
            linears=["a", "c"],
        )
        column = ColwiseParallel()
        return parallelize_module(module, mesh, {"": prepared, "a": column, "b": column, "c": column})

    def call(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x=x)
        return y

    whole = Three("another_input").double()
    with choices() as calls:
        equals_whole(me, whole, parallelize, values((4, 8, WIDTH)), Shard(1), Shard(-1), call, times=1)
    return [f"{op} {choice}" for op, choice in calls]


def test_layers_may_be_named_and_an_input_may_be_a_keyword(ranks: Pool) -> None:
    ranks.run(2, named)


class Changing(nn.Module):
    """Changes a weight and the autocast mode between two layers, after their products were prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        self.b.weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            return y, self.b(x), self.a(x)


def changed(me: Rank) -> None:
    column = ColwiseParallel()
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        whole = Changing().to(dtype)
        plan = {"": whole_input(1), "a": column, "b": column}
        module = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
        x = values((2, 4, WIDTH)).to(dtype)
        with torch.no_grad():
            expected, found = whole(x), module(x.chunk(me.world, 1)[me.rank])
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            if dtype == torch.float64:
                torch.testing.assert_close(one, other.chunk(me.world, -1)[me.rank])


def test_a_changed_weight_and_another_autocast_dtype_are_noticed(ranks: Pool) -> None:
    ranks.run(2, changed)
