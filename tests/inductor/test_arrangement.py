"""An arrangement describes where every element of a rearranged tensor comes from. The tensor can be rebuilt from it."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from torch import Tensor

from symm_overlap.inductor.arrangement import Arrangement, atoms_of, moved, of_shape, permuted, settled, size_of, viewed


def rebuilt(base: Tensor, start: Arrangement, arrangement: Arrangement) -> Tensor:
    """Return the tensor that the arrangement describes, rebuilt from ``base``."""
    order = atoms_of(start)
    atoms = base.reshape([atom.size for atom in order])
    found = atoms.permute([order.index(atom) for atom in atoms_of(arrangement)])
    return found.reshape([size_of(dimension) for dimension in arrangement])


def some_view(shape: list[int], chance: random.Random) -> list[int]:
    """Return another shape with the same number of elements."""
    factors = [factor for size in shape for factor in ([2] * (size // 2 % 2) + [size // 2 if size // 2 % 2 else size])]
    if prod(factors) != prod(shape):
        factors = list(shape)
    made = [1]
    for factor in factors:
        if chance.random() < 0.5:
            made[-1] *= factor
        else:
            made.append(factor)
    return made


@pytest.mark.parametrize("seed", range(200))
def test_a_tensor_rebuilt_from_its_arrangement_is_the_same(seed: int) -> None:
    chance = random.Random(seed)
    shape = [chance.choice([1, 2, 3, 4, 6]) for _ in range(chance.randint(1, 4))]
    base = torch.arange(prod(shape)).view(shape)
    start = of_shape(shape)
    tensor, arrangement = base, start
    understood = 0
    for _ in range(6):
        what = chance.choice(["view", "permute", "move"])
        if what == "view":
            size = some_view(list(tensor.shape), chance)
            changed, found = tensor.reshape(size), viewed(arrangement, size)
        elif what == "permute":
            order = chance.sample(range(tensor.dim()), tensor.dim())
            changed, found = tensor.permute(order), permuted(arrangement, order)
        else:
            source, target = chance.randrange(tensor.dim()), chance.randrange(tensor.dim())
            chunks = chance.choice([2, 3])
            if tensor.shape[source] % chunks:
                continue
            changed = torch.cat(tensor.chunk(chunks, source), target)
            found = moved(arrangement, chunks, source, target)
        if found is None:
            continue
        understood += 1
        tensor, arrangement = changed, found
        assert [size_of(dimension) for dimension in settled(arrangement)] == list(tensor.shape)
        assert torch.equal(rebuilt(base, settled(start), settled(arrangement)), tensor)
    assert understood


def test_a_view_that_cuts_an_atom_unevenly_has_no_arrangement() -> None:
    swapped = permuted(of_shape([4, 3]), [1, 0])
    assert viewed(swapped, [2, 6]) is None
    assert viewed(of_shape([4, 3]), [2, 6]) is not None
