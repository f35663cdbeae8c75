"""Compiled modules whose layers share a gathered input: a layer takes its product only if nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColumnParallelLinear, ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.nn.blocks import WIDTH
from tests.nn.reference import EXACT, TORCH, full, mesh_of, values, weighted
from tests.nn.test_sharing import Three
from tests.ranks import Pool, Rank, RankError
from tests.transforms import choices, comparing

WAYS = [
    "no_gradient_through_one",
    "another_weight",
    "writes_to_one_of_two",
    *(
        pytest.param(way, marks=pytest.mark.slow)
        for way in ("writes_to_the_output", "checkpointed", "another_input", "swapped_weights")
    ),
]


def plan(input: Placement, linears: list[str] | None = None) -> dict[str, object]:
    column = ColwiseParallel()
    prepared = PrepareModuleInput(
        input_layouts=input, desired_input_layouts=Replicate(), use_local_output=True, linears=linears
    )
    return {"": prepared, "a": column, "b": column, "c": column, "down": RowwiseParallel()}


def results(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and the parameters. Compiled code has zeros for no gradient."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x * 1)
    weighted(y, values(tuple(y.shape), 9)).backward()
    wholes = [parameter.full_tensor() for parameter in module.parameters()]
    grads = [parameter.grad for parameter in module.parameters()]
    zeros = (torch.zeros_like(whole) if grad is None else full(grad) for whole, grad in zip(wholes, grads, strict=True))
    return [y.detach(), x.grad, *zeros]


def compiled(me: Rank, way: str, input: Placement) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = parallelize_module(Three(way).double(), mesh_of(me), plan(input))
    x = values((4, 8, WIDTH), me.rank if isinstance(input, Shard) else 0)
    with comparing(False):
        expected = results(module, module, x)
        found = results(torch.compile(module, backend="aot_eager"), module, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_module_may_do_with_its_gathered_input_and_its_weights_what_it_likes(ranks: Pool, way: str) -> None:
    """Output and gradients are those of eager mode, also if a layer gets another weight in the forward pass."""
    # A layer looks at its input and its weight in the same way, whether its input was gathered or not.
    for input in (Shard(1), Replicate()) if way in ("checkpointed", "writes_to_one_of_two") else (Shard(1),):
        ranks.run(2, compiled, way, input, timeout=120)


def write_to_a_part(module: Three, x: Tensor) -> None:
    x.view(-1)[:3].mul_(2)


def write_to_the_data(module: Three, x: Tensor) -> None:
    x.detach().mul_(2)


def write_to_a_weight(module: Three, x: Tensor) -> None:
    with torch.no_grad():
        module.a.weight.mul_(2)


class Writing(Three):
    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.way](self, x)
        return torch.tanh(self.a(x)) * self.b(x)


WRITES = {write.__name__: write for write in (write_to_a_part, write_to_the_data, write_to_a_weight)}


def written_to(me: Rank, way: str, input: Placement, gradients: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = parallelize_module(Writing(way), mesh_of(me), plan(input))
    state = copy.deepcopy(module.state_dict())
    x = values((4, 8, WIDTH), me.rank if isinstance(input, Shard) else 0).float()
    with comparing(False), torch.set_grad_enabled(gradients):
        found = []
        for call in (module, torch.compile(module, backend="aot_eager")):
            module.load_state_dict(state)
            found.append(results(call, module, x) if gradients else [call(x * 1)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", ["write_to_a_weight", *(pytest.param(way, marks=pytest.mark.slow) for way in WRITES if "weight" not in way)]
)
def test_a_compiled_module_that_writes_to_what_was_multiplied_multiplies_again(
    ranks: Pool, way: str, gradients: bool
) -> None:
    """A product that was computed before the write is not used."""
    # Without gradients, there are no products of an input that is replicated already.
    for input in (Shard(1), Replicate()) if gradients else (Shard(1),):
        error = None
        if gradients and way == "write_to_a_part" and isinstance(input, Shard) and TORCH < (2, 14):
            error = "is being modified inplace"  # this torch rejects such a write
        if gradients and way == "write_to_a_weight":
            error = "has been modified by an inplace operation"  # the products that are too old have kept the weight
        if error:
            with pytest.raises(RankError, match=error):
                ranks.run(2, written_to, way, input, gradients, timeout=120)
        else:
            ranks.run(2, written_to, way, input, gradients, timeout=120)


class WritesBetween(Three):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y * self.b(x.mul_(2))


def written_between(me: Rank) -> None:
    torch._dynamo.reset()
    module = parallelize_module(WritesBetween("twice"), mesh_of(me), plan(Replicate()))
    torch.compile(module, backend="aot_eager")(torch.ones(2, 4, WIDTH, requires_grad=True) * 1)


def test_a_compiled_module_must_not_write_to_its_input_between_two_layers(ranks: Pool) -> None:
    """torch raises in eager mode, and computes a wrong gradient in compiled code."""
    with pytest.raises(RankError, match="after one of these layers has read the input"):
        ranks.run(2, written_between, timeout=120)


def dtypes(me: Rank, compile: bool) -> tuple[torch.dtype, torch.dtype, list[str]]:
    """Return the dtypes that a module under autocast sees: its input's, and a layer's outside of autocast."""
    torch._dynamo.reset()
    seen = []

    class Seeing(Three):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                seen.extend([x.dtype, self.a(x).dtype])
            return self.b(x)

    module: nn.Module = parallelize_module(Seeing("twice"), mesh_of(me), plan(Shard(1)))
    module = torch.compile(module, backend="aot_eager") if compile else module
    with comparing(False), torch.autocast("cpu", torch.bfloat16), choices() as calls:
        assert module(torch.ones(2, 4, WIDTH)).dtype is torch.bfloat16
    return seen[0], seen[1], [op for op, _ in calls]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_the_gathered_input_keeps_its_dtype_under_autocast(ranks: Pool, compile: bool) -> None:
    """A layer that the module calls outside of autocast computes in the input's dtype, as with torch's style."""
    (x, product, calls), _ = ranks.run(2, dtypes, compile, timeout=120)
    assert (x, product) == (torch.float32, torch.float32)
    assert calls == ["all_gather_matmul"], "the layer inside autocast takes its product"


def named_twice(me: Rank) -> None:
    torch._dynamo.reset()
    module = Three("twice")
    module.alias = module.a
    parallelize_module(module, mesh_of(me), plan(Shard(1), ["a", "alias", "b"]))
    with comparing(False), torch.no_grad():
        torch.compile(module, backend="aot_eager")(torch.ones(2, 4, WIDTH))
    (slot,) = module.a.offer_slot
    assert (slot.x, slot.weight, slot.product) == (None, None, None)


def test_nothing_is_kept_after_a_compiled_call(ranks: Pool) -> None:
    """This holds even for a layer that is named twice."""
    ranks.run(2, named_twice, timeout=120)


def earlier_layer(me: Rank) -> None:
    layer = ColumnParallelLinear(WIDTH, 2 * WIDTH, mesh=mesh_of(me))
    x = torch.ones(3, WIDTH)
    expected = layer(x)
    del layer.offer_slot
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)


def test_a_layer_of_an_earlier_version_works_once_it_is_loaded(ranks: Pool) -> None:
    """A copy sets the state as loading does."""
    ranks.run(2, earlier_layer)
