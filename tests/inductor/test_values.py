"""The pass never changes what a program computes: traced programs on real ranks, before and after the pass."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from tests.collective.test_fake_group import fake_group
from tests.inductor.all_cases import CASES
from tests.inductor.test_random_programs import strides
from tests.inductor.tracing import inputs_of, overlapped, traced
from tests.ranks import Pool, Rank
from tests.transforms import comparing


def shared(tensors: list[Tensor]) -> set[tuple[int, int]]:
    """Return which tensors are in the same memory, in pairs of their positions."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return {pair for pair in combinations(range(len(places)), 2) if places[pair[0]] == places[pair[1]]}


def same_values(me: Rank, names: list[str], dtype: torch.dtype) -> None:
    for name in names:
        program = CASES[name].program
        inputs = inputs_of(program, me.world, me.group_name, dtype, seed=me.rank)
        graph = traced(program, me.world, me.group_name, inputs)
        changed, _ = overlapped(graph)
        written, also_written = ([tensor.clone() for tensor in inputs] for _ in range(2))
        expected = torch.utils._pytree.tree_leaves(graph(*written))
        with comparing(False):
            found = torch.utils._pytree.tree_leaves(changed(*also_written))
        assert len(found) == len(expected), name
        # Copies stay copies: the program may write to an output without changing another one.
        assert shared(found) <= shared(expected), name
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), name
            assert one.dtype == other.dtype, name
            assert strides(one) == strides(other), name
        assert all(map(torch.equal, written, also_written)), name


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float32), pytest.param(3, torch.bfloat16, marks=pytest.mark.slow)]
)
def test_every_program_computes_the_same_as_before(ranks: Pool, world: int, dtype: torch.dtype) -> None:
    # The result of a collective without a wait may be read before it is complete.
    names = [name for name in CASES if name != "a_collective_that_is_waited_for_elsewhere"]
    # Each program at one of the world sizes, in one of the dtypes: tracing takes long.
    ranks.run(world, same_values, names[world % 2 :: 2], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_program_runs_in_every_dtype(dtype: torch.dtype) -> None:
    """The other test runs each program in one dtype only. Which one depends on the program's place in the list."""
    with fake_group(3) as group:
        for case in CASES.values():
            assert inputs_of(case.program, 3, group, dtype)
