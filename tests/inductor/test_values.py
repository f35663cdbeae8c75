"""The pass never changes what a program computes: traced programs on real ranks, before and after the pass."""

from __future__ import annotations

import pytest
import torch

from tests.inductor.all_cases import CASES
from tests.inductor.tracing import inputs_of, overlapped, traced
from tests.ranks import Pool, Rank
from tests.transforms import comparing


def same_values(me: Rank, names: list[str], dtype: torch.dtype) -> None:
    for name in names:
        program = CASES[name].program
        inputs = inputs_of(program, me.world, me.group_name, dtype, seed=me.rank)
        graph = traced(program, me.world, me.group_name, inputs)
        changed, _ = overlapped(graph)
        expected = torch.utils._pytree.tree_leaves(graph(*[tensor.clone() for tensor in inputs]))
        with comparing(False):
            found = torch.utils._pytree.tree_leaves(changed(*[tensor.clone() for tensor in inputs]))
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), name
            assert one.dtype == other.dtype, name
            assert one.stride() == other.stride() or not other.is_contiguous(), name


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_every_program_computes_the_same_as_before(ranks: Pool, world: int, dtype: torch.dtype) -> None:
    # The result of a collective without a wait may be read before it is complete.
    names = [name for name in CASES if name != "a_collective_that_is_waited_for_elsewhere"]
    # Each program once at each world size, and once in each dtype: tracing takes long.
    ranks.run(world, same_values, names[(world + (dtype == torch.bfloat16)) % 2 :: 2], dtype)
