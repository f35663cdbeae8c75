"""Lengths that the compiler does not take for numbers. torch.distributed requires that the ranks can share them evenly,
and so adds a guard, from which the pass must conclude what follows for halves and chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import symm_overlap
from symm_overlap.inductor._torch import known
from symm_overlap.inductor.arrangement import Atom
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.patterns.gathered import permutation
from symm_overlap.inductor.report import clear, recorded
from symm_overlap.inductor.writer import SymbolicSizeError
from tests.collective.test_fake_group import fake_group
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing

K, N = 6, 5
IN_TORCH_2_12 = torch.__version__.startswith("2.12.")
Program = Callable[[Tensor, Tensor, str], Tensor]


def scatter_rows(x: Tensor, w: Tensor, group: str) -> Tensor:
    return reduce_scatter_tensor(x @ w, "sum", 0, group)


def scatter_the_sequence(x: Tensor, w: Tensor, group: str) -> Tensor:
    return reduce_scatter_tensor(x @ w, "sum", 1, group)


def scatter_sequence_first(x: Tensor, w: Tensor, group: str) -> Tensor:
    return reduce_scatter_tensor((x @ w).transpose(0, 1).contiguous(), "sum", 0, group)


def sum_sequence_first(x: Tensor, w: Tensor, group: str) -> Tensor:
    return all_reduce((x @ w).transpose(0, 1).contiguous(), "sum", group)


def scatter_and_gather_the_sequence(x: Tensor, w: Tensor, group: str) -> Tensor:
    part = reduce_scatter_tensor(x @ w, "sum", 1, group)
    return all_gather_tensor_autograd(part.relu(), 1, group) @ w.t()


def scatter_an_einsum(x: Tensor, w: Tensor, group: str) -> Tensor:
    return reduce_scatter_tensor(torch.einsum("bsk,kn->bsn", x, w), "sum", 1, group)


def scatter_equal_lengths(x: Tensor, w: Tensor, group: str) -> Tensor:
    return reduce_scatter_tensor(x.unflatten(2, (-1, 2)) @ w, "sum", 0, group)


def gather_twice(x: Tensor, w: Tensor, group: str) -> Tensor:
    """The sizes of what is gathered first must not be taken from a tensor that is replaced."""
    y = all_gather_tensor_autograd(x, 0, group) @ w
    return all_gather_tensor_autograd(y, 0, group) @ w.t()


def add_what_is_scattered(x: Tensor, w: Tensor, group: str) -> Tensor:
    return reduce_scatter_tensor(x @ w, "sum", 1, group) + reduce_scatter_tensor(x @ w.cos(), "sum", 1, group)


def add_what_all_ranks_sum(x: Tensor, w: Tensor, group: str) -> Tensor:
    """The ranks need not share the sequence evenly."""
    return all_reduce(x @ w, "sum", group) + all_reduce(x @ w.cos(), "sum", group) + all_reduce(x @ w, "sum", group)


def sum_casts_over_all_ranks(x: Tensor, w: Tensor, group: str) -> Tensor:
    """The program itself says that the ranks can share the sequence."""
    torch._check(x.shape[1] % torch.distributed.get_world_size() == 0)
    return all_reduce((x.half() @ w.half()).float(), "sum", group)


# The program, the number of ranks, the shape of the input, its symbolic dimensions, and how many collectives are fused.
PROGRAMS: list[tuple[Program, int, tuple[int, ...], list[int], int]] = [
    (scatter_rows, 2, (8, K), [0], 1),
    (scatter_rows, 4, (16, 3, K), [0, 1], 1),
    (scatter_the_sequence, 4, (3, 16, K), [1], 1),
    (scatter_sequence_first, 2, (3, 8, K), [0, 1], 1),
    (sum_sequence_first, 2, (3, 7, K), [0, 1], 1),
    (scatter_and_gather_the_sequence, 2, (3, 8, K), [0, 1], 2),
    (scatter_an_einsum, 2, (3, 8, K), [0, 1], 1),
    (gather_twice, 2, (4, 6, K), [0, 1], 2),
    (add_what_is_scattered, 3, (3, 12, K), [0, 1], 1),
    (add_what_all_ranks_sum, 2, (3, 7, K), [0, 1], 1),
    (sum_casts_over_all_ranks, 2, (3, 8, K), [0, 1], 1),
]


@pytest.mark.parametrize(
    ("program", "world", "shape", "symbolic", "fused"),
    PROGRAMS,
    ids=[f"{case[0].__name__}-{case[3]}" for case in PROGRAMS],
)
def test_symbolic_lengths_are_fused(
    program: Program, world: int, shape: tuple[int, ...], symbolic: list[int], fused: int
) -> None:
    if IN_TORCH_2_12 and program is scatter_and_gather_the_sequence:
        pytest.skip("torch 2.12 breaks the graph where a tensor is gathered with gradients along a later dimension")
    torch._dynamo.reset()
    clear()
    x, w = torch.randn(shape), torch.randn(K, N)
    for dim in symbolic:
        torch._dynamo.mark_dynamic(x, dim)  # torch raises an error if the pass assumes a number
    with fake_group(world) as group:
        found = compiled_up_to_the_pass(program, OverlapPass(Choices(strict=True)))(x, w, group)
        expected = program(x, w, group)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    (graph,) = recorded().graphs
    assert graph.fused == fused


def test_equal_lengths_that_are_one_symbol() -> None:
    """Then sizes are powers, and quotients of quotients."""
    torch._dynamo.reset()
    clear()
    x, w = torch.randn(4, 4, 4, K), torch.randn(K, N)
    with fake_group(2) as group:
        compiled = compiled_up_to_the_pass(scatter_equal_lengths, OverlapPass(Choices(strict=True)), dynamic=True)
        found, expected = compiled(x, w, group), scatter_equal_lengths(x, w, group)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert [graph.fused for graph in recorded().graphs] == [1]


def test_atoms_that_only_one_side_has_are_no_permutation() -> None:
    a, b, c = Atom(2), Atom(3), Atom(5)
    assert permutation([a, b, c], [c, a, b]) == [2, 0, 1]
    with pytest.raises(SymbolicSizeError):
        permutation([a, b], [a, b, c])


def by_einsum(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsk,kn->bsn", x, w)


def train(me: Rank, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    w = torch.randn(K, N, dtype=torch.float64, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        part = reduce_scatter_tensor_autograd(multiply(x, w), "sum", 1, me.group).relu()
        return multiply(all_gather_tensor_autograd(part, 1, me.group), w.t())

    compiled = compiled_up_to_the_pass(program, OverlapPass(Choices(strict=True)))
    for batch, length in ((3, 2), (2, 4), (5, 3)):
        x = torch.randn(batch, length * me.world, K, dtype=torch.float64)
        results = []
        for run in (compiled, program):
            w.grad, leaf = None, x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(leaf, [0, 1])
            with comparing(False):
                y = run(leaf)
                y.square().sum().backward()
            results.append([y.detach(), leaf.grad, w.grad])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert [graph.fused for graph in symm_overlap.inductor.report().graphs] == [2, 2]  # compiled once


@pytest.mark.skipif(IN_TORCH_2_12, reason="torch 2.12 breaks this graph: see above")
@pytest.mark.parametrize(("world", "multiply"), one_in(3, [(2, torch.matmul), (2, by_einsum), (3, torch.matmul)]))
def test_values_and_gradients_of_several_lengths(
    ranks: Pool, world: int, multiply: Callable[[Tensor, Tensor], Tensor]
) -> None:
    ranks.run(world, train, multiply, timeout=120)


def test_what_is_known_if_nothing_remains() -> None:
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    s, t = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(8, 12), symbolic_context=context).shape
    assert not known(s // 2 * 2 == s)
    assert s % 2 == 0  # a guard
    assert known(s // 2 * 2 == s)
    assert known((s + 1) // 2 * 2 == s)
    assert known(2 * (s - (s + 1) // 2) == s)
    assert known((s + 3) // 2 == s // 2 + 1)
    assert known(s * t % 2 == 0)
    assert known(s * t // 2 == s // 2 * t)
    assert known(-(-s // 2) * 2 == s)  # how Python programs round up
    assert known(-s % 2 == 0)
    assert known(-3 * s // 2 * 2 == -3 * s)
    assert not known(s // 4 * 4 == s)
    assert not known((s + 1) // 2 * 2 == s + 1)
    assert not known(t // 2 * 2 == t)
    assert not known(-(-t // 2) * 2 == t)
    assert not known((s - t) // 2 * 2 == s - t)
    assert not known(s // t * t == s)
    assert not known(s * t // 4 * 4 == s * t)
    assert not known(s // 2 == 4)
    assert not known(s // 2 // s * s == s // 2)  # a quotient of quotients; a fraction of fractions would be known
    assert not known(s // (s // 2) == 2)  # s may be 0
    assert t % 3 == 0  # another guard
    assert known(s // 2 * t // 3 * 6 == s * t)  # a quotient of a product of quotients
