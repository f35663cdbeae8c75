"""Random programs of collectives, matmuls, views and pointwise operations compute the same with the pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inductor.cases import New, Program, gather, reduce, scatter
from tests.inductor.tracing import inputs_of, overlapped, traced
from tests.ranks import Pool, Rank
from tests.transforms import comparing


def random_program(seed: int) -> Program:
    """A program that is the same on every rank, and in every call."""

    def program(world: int, name: str, new: New) -> Any:
        chance = random.Random(seed)
        rows = 2 * world * world
        values: list[Tensor] = [new(rows, 4), new(2, rows // 2, 4)]
        for _ in range(chance.randint(4, 10)):
            x = values[-1] if chance.random() < 0.7 else chance.choice(values)
            values.append(change(x, chance, world, name, new))
        return values[2:] if chance.random() < 0.5 else values[-1]

    return program


def change(x: Tensor, chance: random.Random, world: int, name: str, new: New) -> Tensor:
    what = chance.choice(
        ["matmul", "matmul", "matmul", "bias", "gather", "scatter", "scatter", "reduce", "add", "view"]
    )
    dim = chance.randrange(x.dim())
    if what in ("matmul", "bias"):
        flat, weight = x.reshape(-1, x.shape[-1]), new(x.shape[-1], chance.choice([4, 2 * world]))
        product = flat @ weight if what == "matmul" else torch.addmm(new(weight.shape[1]), flat, weight)
        return (product % 2).view(*x.shape[:-1], -1) if chance.random() < 0.3 else product.view(*x.shape[:-1], -1)
    if what == "gather" and x.numel() < 4000:
        whole = gather(x.contiguous(), world, name)
        order = list(range(world))
        if chance.random() < 0.2:
            chance.shuffle(order)
        chunks = whole.chunk(world)
        return torch.cat([chunks[rank] for rank in order], dim) if dim or order != sorted(order) else whole
    if what == "scatter" and x.shape[dim] % world == 0 and x.shape[dim] > world:
        return scatter(torch.cat(x.chunk(world, dim)) if dim else x.contiguous(), world, name)
    if what == "reduce":
        return reduce(x.contiguous(), name)
    if what == "add":
        return x + (x.reshape(-1, x.shape[-1]) @ new(x.shape[-1], x.shape[-1])).view(x.shape)
    if what == "view" and x.dim() == 3:
        return chance.choice([x.flatten(0, 1), x.transpose(0, 1), x.permute(2, 0, 1)])
    if x.dim() == 2 and x.shape[0] % 2 == 0:
        return chance.choice([x.view(2, -1, x.shape[1]), x.t()])
    return x.relu()


def same_values(me: Rank, seeds: list[int]) -> int:
    fused = 0
    for seed in seeds:
        program = random_program(seed)
        inputs = inputs_of(program, me.world, me.group_name, torch.float64, seed=1000 * seed + me.rank)
        graph = traced(program, me.world, me.group_name, inputs)
        changed, report = overlapped(graph)
        fused += report.fused
        expected = torch.utils._pytree.tree_leaves(graph(*[tensor.clone() for tensor in inputs]))
        with comparing(False):
            found = torch.utils._pytree.tree_leaves(changed(*[tensor.clone() for tensor in inputs]))
        assert len(found) == len(expected), seed
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0, msg=f"seed {seed}")
    return fused


@pytest.mark.parametrize("first", range(0, 80, 20))
@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_compute_the_same_as_before(ranks: Pool, world: int, first: int) -> None:
    fused = ranks.run(world, same_values, list(range(first, first + 20)), timeout=120)
    assert fused[0] >= 4
    assert len(set(fused)) == 1, "every rank fuses the same"
