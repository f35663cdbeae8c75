"""A tensor that is several inputs of a module, as in ``attention(x, x)``, is gathered once, for all of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.nn.blocks import HIDDEN, WIDTH
from tests.nn.reference import EXACT, equals_whole, mesh_of, values, weighted
from tests.ranks import Pool, Rank
from tests.transforms import choices, comparing


class Attention(nn.Module):
    """One input for the queries, and another one for keys and values, as in torchtune."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HIDDEN) for _ in range(3))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.down(torch.tanh(self.q(x)) * self.k(y).sin() + self.v(y))


def parallelize(how: str, linears: list[str] | None) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    inputs = 1 if how == "one" else 2
    given: dict[str, Any] = {"input_layouts": inputs * (Shard(1),), "desired_input_layouts": inputs * (Replicate(),)}
    if how == "keywords":
        given = {"input_kwarg_layouts": {"x": Shard(1), "y": Shard(1)}}
        given["desired_input_kwarg_layouts"] = {"x": Replicate(), "y": Replicate()}
    prepared = PrepareModuleInput(**given, use_local_output=True, linears=linears)
    column = ColwiseParallel()
    plan = {"": prepared, "q": column, "k": column, "v": column, "down": RowwiseParallel(output_layouts=Shard(1))}
    return lambda module, mesh: parallelize_module(module, mesh, plan)


def train(me: Rank, how: str, linears: list[str] | None) -> list[str]:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        if how == "keywords":
            return module(x=x, y=x)  # type: ignore[no-any-return]
        inputs = {"one": (x,), "same": (x, x), "different": (x, 2 * x)}
        return module(*inputs[how])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    whole = Attention().double()
    applied = parallelize(how, linears)
    with choices() as calls:
        equals_whole(me, whole, applied, values((4, 8, WIDTH)), Shard(1), Shard(1), call, times=1)
    return [op for op, _ in calls]


@pytest.mark.parametrize("linears", [None, ["q", "k", "v"]])
@pytest.mark.parametrize("how", ["same", "keywords"])
def test_one_gather_serves_all_layers(ranks: Pool, how: str, linears: list[str] | None) -> None:
    assert ranks.run(2, train, how, linears) == ranks.run(2, train, "one", linears)


@pytest.mark.parametrize("linears", [None, ["q"]])
def test_two_tensors_are_gathered_by_themselves(ranks: Pool, linears: list[str] | None) -> None:
    for calls in ranks.run(2, train, "different", linears):
        assert calls[0] == "matmul_reduce_scatter", calls


def compiled(me: Rank) -> list[list[str]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = parallelize("same", None)(Attention().double(), mesh_of(me))
    results, ops = [], []
    with comparing(False):
        for function in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
            x = values((4, 4, WIDTH), me.rank).requires_grad_()
            with choices() as calls:
                y = function(x, x)
                weighted(y, values(tuple(y.shape), 9)).backward()
            results.append((y.detach(), x.grad))
            ops.append([op for op, _ in calls])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    return ops


def test_one_gather_serves_all_layers_of_a_compiled_module_too(ranks: Pool) -> None:
    for eager, graph in ranks.run(2, compiled, timeout=120):
        assert sorted(graph) == sorted(eager)
