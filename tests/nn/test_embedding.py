"""Embeddings: the same as torch's styles in every layout, with the whole weight's values, gradients, and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap import nn as ours
from symm_overlap.nn.embedding import EmbeddingLayout
from tests.nn.reference import EXACT, TORCH, full, local_of, mesh_of, part, same_gradients, values, weighted
from tests.quick import one_in
from tests.ranks import Pool, Rank

WIDTH, LENGTH = 8, 4
NAMES = ["ColwiseParallel", "RowwiseParallel"]


def words(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(rows, (2, length), generator=torch.Generator().manual_seed(3))


def as_in_torch(
    me: Rank, name: str, given: Placement, wanted: Placement, local: bool, rows: int, length: int, **options: Any
) -> None:
    """Compare torch's style with ours: the output, its layout, and the gradient, with gradients and without."""
    mesh, whole = mesh_of(me), words(rows, length)
    torch.manual_seed(0)
    module = nn.Embedding(rows, WIDTH, dtype=torch.float64, **options)
    found: list[Any] = []
    contiguous: list[bool] = []
    for styles in (parallel, ours):
        style = getattr(styles, name)(input_layouts=given, output_layouts=wanted, use_local_output=local)
        mine = parallelize_module(copy.deepcopy(module), mesh, style)
        assert (styles is ours) == isinstance(getattr(mine, "parallel", None), EmbeddingLayout)
        x = part(me, whole, given)
        with torch.no_grad():
            without = mine(x)
        y = mine(x)
        assert isinstance(y, DTensor) is not local
        weighted(local_of(y), values(tuple(local_of(y).shape), 4)).backward()
        placements = y.placements if isinstance(y, DTensor) else None
        gradient: Any = mine.weight.grad
        found.append((placements, local_of(without), local_of(y).detach(), full(gradient)))
        contiguous.append(local_of(y).is_contiguous())
    assert found[1][0] == found[0][0]
    assert contiguous[1] or not contiguous[0]
    torch.testing.assert_close(found[1][1:], found[0][1:], **EXACT)
    assert gradient.placements == mine.weight.placements  # with torch's style, every rank has a whole gradient


@pytest.mark.parametrize("local", [True, False], ids=["tensor", "DTensor"])
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_is_that_of_torch(ranks: Pool, name: str, local: bool) -> None:
    for wanted in (Replicate(), Shard(0), Shard(1), Shard(-1)):
        ranks.run(2, as_in_torch, name, Replicate(), wanted, local, 6, LENGTH, padding_idx=4)
    ranks.run(2, as_in_torch, name, Shard(1), Replicate(), local, 6, LENGTH)
    ranks.run(2, as_in_torch, name, Replicate(), Replicate(), local, 6, LENGTH, padding_idx=1)


@pytest.mark.parametrize("rows", [7, 10])
def test_a_vocabulary_and_a_sequence_that_do_not_divide(ranks: Pool, rows: int) -> None:
    for world in (2, 4):
        ranks.run(world, as_in_torch, "RowwiseParallel", Replicate(), Replicate(), True, rows, LENGTH)
    for wanted in (Replicate(), Shard(1)):
        ranks.run(2, as_in_torch, "RowwiseParallel", Replicate(), wanted, True, rows, 5)


def left_to_torch(me: Rank, name: str, rows: int, width: int, options: dict[str, Any]) -> None:
    module = nn.Embedding(rows, width, **options)
    style = getattr(ours, name)(input_layouts=Replicate(), output_layouts=Replicate())
    expected = module(words(rows))
    mine = parallelize_module(copy.deepcopy(module), mesh_of(me), style)
    assert not hasattr(mine, "parallel")
    torch.testing.assert_close(mine(words(rows)), expected)


def test_what_is_left_to_torch(ranks: Pool) -> None:
    ranks.run(2, left_to_torch, "ColwiseParallel", 6, 7, {})  # features that do not divide
    ranks.run(2, left_to_torch, "RowwiseParallel", 6, 8, {"scale_grad_by_freq": True})


def without_rows(me: Rank, rows: int, padding: int | None, compiled: bool) -> None:
    """With torch's style, a rank without rows raises an error, and the others wait for it."""
    torch.manual_seed(0)
    whole = nn.Embedding(rows, WIDTH, padding_idx=padding).double()
    style = ours.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), style)
    assert isinstance(model.parallel, EmbeddingLayout)
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    expected = whole(words(rows))
    weights = values(tuple(expected.shape))
    weighted(expected, weights).backward()
    found = called(words(rows))
    torch.testing.assert_close(found, part(me, expected, Shard(1)), **EXACT)
    weighted(found, part(me, weights, Shard(1))).backward()
    same_gradients(model, whole, **EXACT)
    for index in (-1, rows, rows + 1):
        with pytest.raises(IndexError, match="index out of range"):
            model(torch.tensor([[0, 0, index, 0]]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_vocabulary_that_leaves_ranks_without_rows(ranks: Pool, compiled: bool) -> None:
    for rows, padding in ((1, None), (2, 1), (5, 4), (6, None), (4, None), (3, 0)):
        ranks.run(4, without_rows, rows, padding, compiled)


def outside(me: Rank, name: str, index: int) -> None:
    style = getattr(ours, name)(input_layouts=Replicate(), output_layouts=Replicate())
    module = parallelize_module(nn.Embedding(6, WIDTH), mesh_of(me), style)
    with pytest.raises(IndexError, match="index out of range"):
        module(torch.tensor([0, index, 5]))


@pytest.mark.parametrize("name", NAMES)
def test_an_index_outside_the_vocabulary_is_an_error_on_every_rank(ranks: Pool, name: str) -> None:
    """With torch's style, its output is zeros if the vocabulary is sharded."""
    for index in (-1, 6, 100):
        ranks.run(2, outside, name, index)


class Model(nn.Module):
    """An embedding that is tied to the head, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(torch.tanh(self.up(self.embedding(x)))))
        return y


def trains(me: Rank, wanted: Placement, compiled: bool) -> None:
    torch.manual_seed(0)
    whole = Model().double()
    plan = {
        "embedding": ours.RowwiseParallel(input_layouts=Replicate(), output_layouts=wanted),
        "up": ours.ColwiseParallel(input_layouts=wanted),
        "down": ours.RowwiseParallel(output_layouts=wanted),
        "head": ours.ColwiseParallel(input_layouts=wanted, output_layouts=Replicate()),
    }
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
    assert model.head.weight is model.embedding.weight
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = words(12)
    expected = whole(x)
    found = called(x)
    torch.testing.assert_close(found, expected, **EXACT)
    weights = values(tuple(expected.shape))
    weighted(expected, weights).backward()
    weighted(found, weights).backward()
    for (name, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient: Any = mine.grad
        torch.testing.assert_close(full(gradient), other.grad, msg=lambda text, name=name: f"{name}: {text}", **EXACT)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
        torch.testing.assert_close(program.module()(11 - x), whole(11 - x), **EXACT)


def penalised(me: Rank, name: str) -> None:
    """Differentiate the square of a gradient."""
    torch.manual_seed(0)
    whole = nn.Embedding(6, WIDTH).double()
    style = getattr(ours, name)(input_layouts=Replicate(), output_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(whole), mesh_of(me), style)
    for module in (whole, model):
        found = torch.tanh(module(words(6))).square().sum()
        (gradient,) = torch.autograd.grad(found, module.weight, create_graph=True)
        full(gradient.square().sum()).backward()
    torch.testing.assert_close(full(model.weight.grad), whole.weight.grad, **EXACT)
    assert whole.weight.grad.abs().max() > 0


@pytest.mark.skipif(TORCH < (2, 13), reason="gradients by DTensors can be differentiated again since torch 2.13")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_can_be_differentiated_again(ranks: Pool, name: str) -> None:
    ranks.run(2, penalised, name)


def under_fsdp(me: Rank) -> None:
    """With torch's style, torch 2.13 cannot compile this model: "Mixing fake modes"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    plan = {"0": ours.RowwiseParallel(input_layouts=Replicate()), "1": ours.ColwiseParallel()}
    model = fully_shard(parallelize_module(copy.deepcopy(whole), mesh["tp"], plan), mesh=mesh["dp"])
    x = words(12)
    expected = whole(x)
    found = torch.compile(model, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected.chunk(2, -1)[mesh["tp"].get_local_rank()], **EXACT)
    found.sum().backward()
    expected.sum().backward()
    same_gradients(model, whole, **EXACT)


def test_a_compiled_model_under_fsdp2_on_a_mesh_of_two_dimensions(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(4).run(4, under_fsdp)


@pytest.mark.parametrize("wanted", one_in(2, [Shard(1), Replicate()]), ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_whole_model_trains_and_is_exported(ranks: Pool, compiled: bool, wanted: Placement) -> None:
    ranks.run(2, trains, wanted, compiled)
