"""Layouts mean the same as in torch's styles. A DTensor's own placements count, and it is redistributed if needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import parallelize_module

from symm_overlap import nn as ours
from tests.nn.reference import EXACT, full, local_of, mesh_of, part, same_gradients, values, weighted
from tests.ranks import Pool, Rank

WIDTH, OUT = 8, 16
LAYOUTS = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]


def laid_out(me: Rank, whole: Tensor, layout: Placement) -> Tensor:
    """Return this rank's part of a tensor with this layout, as a leaf that requires a gradient."""
    if isinstance(layout, Partial):
        return (whole * (me.rank + 1) / sum(range(me.world + 1))).requires_grad_()
    return part(me, whole, layout).clone().requires_grad_()


def as_in_torch(me: Rank, name: str, given: Placement, wanted: Placement, local: bool, as_dtensor: bool) -> None:
    """Compare torch's style with ours: the output, its type and layout, and every gradient.

    If a tensor is contiguous with torch's style, it must be so with ours: models, and functions with their own backward
    pass, may view it as another shape.
    """
    mesh, whole = mesh_of(me), values((4, 8, WIDTH))
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, OUT).double()
    found: list[Any] = []
    without: list[Tensor] = []
    contiguous: list[bool] = []
    for styles in (parallel, ours):
        style = getattr(styles, name)
        # Our style uses the placements of a DTensor and ignores input_layouts. torch's style checks the placements only
        # if input_layouts differs from the layout that it needs.
        said = Shard(0) if as_dtensor and styles is ours else given
        options = {"input_layouts": said, "output_layouts": wanted, "use_local_output": local}
        module = parallelize_module(copy.deepcopy(linear), mesh, style(**options))
        leaf = laid_out(me, whole, given)
        leaf.register_hook(lambda grad: contiguous.append(grad.is_contiguous()))
        x = DTensor.from_local(leaf, mesh, [given], run_check=False) if as_dtensor else leaf
        with torch.no_grad():  # in which ours takes no DTensor
            without.append(local_of(module(x)))
        y = module(x)
        assert isinstance(y, DTensor) is not local
        mine = local_of(y)
        contiguous.append(mine.is_contiguous())
        weighted(mine, values(tuple(mine.shape), 4)).backward()
        placements = y.placements if isinstance(y, DTensor) else None
        found.append((mine.detach(), placements, leaf.grad, [full(each.grad) for each in module.parameters()]))
    (y, layout, *gradients), (expected, expected_layout, *expected_gradients) = found[1], found[0]
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(without, [expected, expected], **EXACT)
    assert without[1].is_contiguous() or not without[0].is_contiguous()
    assert layout == expected_layout
    torch.testing.assert_close(gradients, expected_gradients, **EXACT)
    for place, with_torch, with_ours in zip(("output", "gradient"), contiguous[:2], contiguous[2:], strict=True):
        assert with_ours or not with_torch, place


@pytest.mark.parametrize("as_dtensor", [False, True], ids=["tensor", "DTensor"])
@pytest.mark.parametrize("name", ["ColwiseParallel", "RowwiseParallel"])
def test_inputs_and_outputs_of_every_layout(ranks: Pool, name: str, as_dtensor: bool) -> None:
    for given in LAYOUTS:
        for local in (True, False):
            ranks.run(2, as_in_torch, name, given, Shard(-1), local, as_dtensor)
            ranks.run(2, as_in_torch, name, given, Replicate(), local, as_dtensor)
            ranks.run(2, as_in_torch, name, given, Shard(1), local, as_dtensor)


class Doubled(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def prepared(me: Rank, given: Placement, wanted: Placement, length: int, dtype: torch.dtype) -> None:
    """Compare torch's style with ours: what the module gets, and that the caller's tensor stays as it was."""
    mesh, whole = mesh_of(me), values((2, length, WIDTH)).to(dtype)
    found: list[Tensor] = []
    for styles in (parallel, ours):
        style = styles.PrepareModuleInput(input_layouts=given, desired_input_layouts=wanted, use_local_output=True)
        module, x = parallelize_module(Doubled(), mesh, style), part(me, whole, given).clone()
        before = x.clone()
        with torch.no_grad(), torch.autocast("cpu", enabled=dtype == torch.float32):
            found.append(module(x).clone())
        assert torch.equal(x, before)
    torch.testing.assert_close(found[1], found[0], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
def test_inputs_of_modules_without_gradients(ranks: Pool, dtype: torch.dtype) -> None:
    for given in LAYOUTS:
        for wanted in LAYOUTS[:-1]:
            if given != wanted and not isinstance(given, Partial):
                ranks.run(2, prepared, given, wanted, 8, dtype)
    ranks.run(2, prepared, Replicate(), Shard(1), 7, dtype)  # of which rank 0 has one more


class Kept(nn.Module):
    """Stores its input and the output of its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        self.tensors = x, self.linear(x)
        return self.tensors[1]


def as_gathered(me: Rank, contiguous: bool) -> None:
    """A gathered tensor has the gathered dimension first in memory. It is copied only if it must be contiguous."""
    mesh, x = mesh_of(me), torch.ones(4, 8 // me.world, WIDTH)
    prepared = ours.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True, contiguous=contiguous
    )
    module = Kept()
    parallelize_module(module, mesh, {"": prepared, "linear": ours.ColwiseParallel(contiguous=contiguous)})
    module(x)
    alone = ours.ColwiseParallel(input_layouts=Shard(1), contiguous=contiguous)
    layers = [
        parallelize_module(nn.Linear(WIDTH, OUT), mesh, alone),
        ours.ColumnParallelLinear(WIDTH, OUT, mesh=mesh, sequence_dim=1, contiguous=contiguous),
        ours.ColumnParallelLinear.from_linear(nn.Linear(WIDTH, OUT), mesh=mesh, sequence_dim=1, contiguous=contiguous),
    ]
    for tensor in (*module.tensors, *(layer(x) for layer in layers)):
        assert tensor.is_contiguous() is contiguous
        assert tensor.transpose(0, 1).is_contiguous() is not contiguous


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_is_gathered_is_contiguous_or_as_it_came(ranks: Pool, contiguous: bool) -> None:
    """With ``contiguous``, gathered tensors are contiguous. Otherwise, they keep the memory layout of the gather."""
    ranks.run(2, as_gathered, contiguous)


def norms(me: Rank, given: Placement, local: bool) -> None:
    mesh, whole = mesh_of(me), values((4, 8, WIDTH))
    norm = nn.LayerNorm(WIDTH).double()
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    everything = whole.clone().requires_grad_()
    expected = norm(everything)
    weights = values(tuple(expected.shape), 4)
    weighted(expected, weights).backward()
    style = ours.SequenceParallel(use_local_output=local)
    module = parallelize_module(copy.deepcopy(norm), mesh, style)
    module.zero_grad()
    leaf = laid_out(me, whole, given)
    y = module(DTensor.from_local(leaf, mesh, [given], run_check=False))
    assert isinstance(y, DTensor) is not local
    mine = y.to_local() if isinstance(y, DTensor) else y
    torch.testing.assert_close(mine, part(me, expected, Shard(1)), **EXACT)
    weighted(mine, part(me, weights, Shard(1))).backward()
    gradient = everything.grad if isinstance(given, Partial) else part(me, everything.grad, given)
    torch.testing.assert_close(leaf.grad, gradient, **EXACT)
    same_gradients(module, norm, **EXACT)
    assert module.weight.grad.placements == (Replicate(),)


def test_a_norm_redistributes_its_input(ranks: Pool) -> None:
    for given in LAYOUTS:
        for local in (True, False):
            ranks.run(2, norms, given, local)


def left_to_torch(me: Rank) -> None:
    """torch's style handles dropout, which has no parameters and whose masks differ between ranks."""
    mesh = mesh_of(me)
    dropout = parallelize_module(nn.Dropout(0.0), mesh, ours.SequenceParallel())
    x = values((2, 4, WIDTH))
    y = dropout(part(me, x, Shard(1)))
    assert isinstance(y, DTensor)
    torch.testing.assert_close(y.full_tensor(), x)


def test_what_is_left_to_torch(ranks: Pool) -> None:
    ranks.run(2, left_to_torch)


def values_of_rank_0(me: Rank) -> None:
    torch.manual_seed(0)
    first = [nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)]
    nn.init.normal_(first[2].weight)
    mine = copy.deepcopy(first)
    for module in mine if me.rank else []:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    for style, module, expected in zip(
        (ours.ColwiseParallel(), ours.RowwiseParallel(), ours.SequenceParallel()), mine, first, strict=True
    ):
        parallelize_module(module, mesh_of(me), style)
        for found, parameter in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(full(found), parameter)


def test_all_ranks_get_the_values_of_rank_0(ranks: Pool) -> None:
    ranks.run(2, values_of_rank_0)
