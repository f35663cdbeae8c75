"""Modules that ran inside `prepare` have the same state afterwards as before, and no tensors without data."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import symm_overlap
from symm_overlap._torch import has_no_data
from tests.ranks import Pool, Rank


class Rotary(nn.Module):
    """A module that caches tensors in an attribute, a tuple and a new buffer, and renews them for longer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.cos = 0, None
        self.pair = (torch.zeros(1), torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.length:
            self.length = x.shape[0]
            self.cos = torch.arange(float(x.shape[0])).unsqueeze(1).cos()
            self.pair = (self.cos, self.cos.square())
            self.made = self.cos.neg()
            self.register_buffer("sin", 1 - self.cos, persistent=False)
        return x * self.cos + self.pair[1] - self.made + self.sin


class Layer(nn.Module):
    """A module that adds up its inputs in a buffer and sets an attribute of its child module."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.group, self.rotary, self.inner = group, Rotary(), nn.Linear(4, 4)
        self.register_buffer("seen", torch.full((4,), 5.0))
        self.runs, self.kept = 0, [torch.ones(1)]

    def forward(self, x: Tensor, keep: bool = False) -> Tensor:
        self.runs += 1
        self.seen = self.seen + x.sum(0)
        self.inner.scale = x.mean()
        if keep:
            self.kept.append(x.sum())
        return symm_overlap.all_gather(self.inner(self.rotary(x)) * self.inner.scale, 0, self.group)


def tensors_without_data(root: nn.Module) -> list[str]:
    states = [(module, {**vars(module), **module._buffers, **module._parameters}) for module in root.modules()]
    return [name for _, state in states for name, value in state.items() if has_no_data(value)]


def run_twice(me: Rank) -> None:
    layer, fresh = Layer(me.group), Layer(me.group)
    fresh.load_state_dict(layer.state_dict())
    with symm_overlap.prepare():
        layer(torch.empty(3, 4))
        layer.eval()
        layer(torch.empty(8, 4)).sum().backward()
        assert layer.rotary.length == 8
        assert has_no_data(layer.inner.scale)
        nn.Linear(4, 4)(torch.empty(2, 4))  # a module that is created inside, without data
    assert tensors_without_data(layer) == []
    assert (layer.runs, layer.rotary.length, layer.rotary.cos) == (0, 0, None)
    assert layer.seen.tolist() == [5.0] * 4
    assert not hasattr(layer.inner, "scale")
    assert not hasattr(layer.rotary, "sin")
    assert not hasattr(layer.rotary, "made")
    assert not layer.training
    assert not layer.rotary.training
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(layer(x), fresh(x))
    assert torch.equal(layer.seen, fresh.seen)


def keeps_a_list(me: Rank) -> None:
    layer = Layer(me.group)
    with pytest.raises(RuntimeError, match=r"into Layer\.kept: take them out at the end"), symm_overlap.prepare():
        layer(torch.empty(3, 4), keep=True)
    assert layer.seen.tolist() == [5.0] * 4
    assert layer.kept.pop().shape == ()
    with symm_overlap.prepare():
        layer(torch.empty(3, 4), keep=True)
        layer.kept.pop()
    with suppress(ZeroDivisionError), symm_overlap.prepare():
        layer(torch.empty(3, 4))
        raise ZeroDivisionError
    assert layer.runs == 0
    assert tensors_without_data(layer) == []


def counts(me: Rank) -> None:
    """In-place operations have no effect inside, even if their operands are only numbers and tensors from outside."""
    layer, total = nn.BatchNorm1d(4), torch.zeros(4)
    with symm_overlap.prepare():
        symm_overlap.all_gather(layer(torch.empty(3, 4)), 0, me.group)
        total.add_(1)
        total.add_(layer.running_var)
        torch.mul(total, 2, out=total)
        with torch.no_grad():
            layer.weight.fill_(7)
    assert layer.num_batches_tracked == 0
    assert not total.any()
    assert layer.weight.unique() == 1


def both(me: Rank) -> None:
    run_twice(me)
    keeps_a_list(me)
    counts(me)


def test_modules_have_what_they_had_before_the_block_or_it_raises(ranks: Pool) -> None:
    ranks.run(2, both)
