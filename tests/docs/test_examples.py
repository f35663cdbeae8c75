"""Tests that the examples of CONTRIBUTING.md work. Each one is one file, and needs only one new line in the package.

The examples are imported in separate ranks, so that they affect no other test. The tests do not add the line to an
``__init__``. They do its work themselves: an import, or an entry in a table.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from symm_overlap.plan import plan_calls, verify_planner
from symm_overlap.plan.testing import redundant
from symm_overlap.runtime import Backend
from tests.collective.planners.world import World
from tests.collective.reference import same
from tests.docs.examples.all_to_all import ALL_TO_ALL, all_to_all
from tests.docs.examples.exact_cpu import ExactCpuBackend
from tests.ranks import Pool

WORLDS = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def ranks_with_the_op():
    """Two ranks with an additional op."""
    with Pool(2, groups=[(0,)]) as pool:
        yield pool


def gathered(me, shard):
    parts = [torch.empty_like(shard) for _ in range(me.world)]
    dist.all_gather(parts, shard.detach(), group=me.group)
    return torch.cat(parts)


def op_equals_plain_pytorch(me):
    from tests.docs.examples.all_gather_square_norms import all_gather_square_norms  # the line in ops/__init__.py

    shard = torch.randn(6, 8, generator=torch.Generator().manual_seed(me.rank), dtype=torch.float64)
    shard.requires_grad_()
    whole = gathered(me, shard)
    found = all_gather_square_norms(shard, me.group)
    torch.testing.assert_close(found, whole.square().sum(1), rtol=1e-14, atol=0)
    weights = torch.arange(1.0, 6 * me.world + 1, dtype=torch.float64)
    (found * weights).sum().backward()
    mine = me.world * weights[6 * me.rank : 6 * me.rank + 6]
    torch.testing.assert_close(shard.grad, 2 * shard.detach() * mine.unsqueeze(1), rtol=1e-14, atol=0)
    arguments = shard.detach().requires_grad_(), me.group_name
    torch.library.opcheck(torch.ops.symm_overlap.all_gather_square_norms.default, arguments)


@pytest.mark.parametrize("world", [1, 2])
def test_an_op_takes_one_file(ranks_with_the_op, world):
    ranks_with_the_op.run(world, op_equals_plain_pytorch)


def the_op_on_every_path(me, path):
    import symm_overlap
    from tests.docs.examples.all_gather_square_norms import all_gather_square_norms

    shard = torch.randn(6, 8, generator=torch.Generator().manual_seed(me.rank), dtype=torch.float64)
    with symm_overlap.force_path(path, chunks=2):
        found = all_gather_square_norms(shard, me.group)
    torch.testing.assert_close(found, gathered(me, shard).square().sum(1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
def test_a_new_op_runs_on_every_path(ranks_with_the_op, path):
    ranks_with_the_op.run(2, the_op_on_every_path, path)


@pytest.mark.parametrize("world", WORLDS)
def test_a_planner_takes_one_file_and_its_plans_hold(world):
    verify_planner(all_to_all, world, graphs=True, contract=ALL_TO_ALL).raise_for_problems()


@pytest.mark.parametrize("world", WORLDS[1:])
def test_no_synchronisation_of_the_new_plans_is_idle(world):
    assert redundant(plan_calls(all_to_all, world)) == []


@pytest.mark.parametrize("world", WORLDS)
def test_the_new_plans_exchange_every_part(world):
    inputs = [[[100 * rank + 10 * part + call for part in range(world)] for rank in range(world)] for call in range(3)]
    results = World(world).run(plan_calls(all_to_all, world), inputs)
    for call in range(3):
        assert results[call] == [
            [[100 * source + 10 * rank + call for source in range(world)]] for rank in range(world)
        ]


def tensors_by_the_new_plan(me):
    from symm_overlap.collective.exchange import Call, Peers
    from symm_overlap.collective.problem import problem
    from symm_overlap.settings import current
    from tests.docs.examples.all_to_all_run import AllToAll

    for number in range(3):
        X = torch.arange(me.world * 6.0).view(me.world, 2, 3) + 1000 * me.rank + number
        found, expected = torch.empty_like(X), torch.empty_like(X)
        described = problem("all_gather", 2 * me.world, 3, 0, X.dtype, me.world, "cpu", arguments=(X.shape,))
        call = Call(Peers(me.group_name, current()), described, X.device)
        AllToAll(call, X, found).run()
        dist.all_to_all_single(expected, X, group=me.group)
        same(found, expected)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_the_new_plans_exchange_tensors(ranks, world):
    ranks.run(world, tensors_by_the_new_plan)


def noted(function, used):
    def run(*arguments):
        used.append(function.__name__)
        function(*arguments)

    return run


def ops_through_the_library(me):
    import symm_overlap
    from symm_overlap.collective import exchange
    from symm_overlap.collective.choosing import chooser
    from tests.docs.examples import library

    exchange._EXCHANGES["library"] = library  # the line in exchange/__init__.py
    chooser._exchange = lambda *problem: "library"  # the rule in the chooser
    used = []
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(library, name, noted(getattr(library, name), used))
    A = torch.randint(0, 2, (4, 8), generator=torch.Generator().manual_seed(me.rank)).double()
    B = torch.randint(0, 2, (8, 3), generator=torch.Generator().manual_seed(10 + me.rank)).double()
    whole, summed = gathered(me, A), A @ B
    dist.all_reduce(summed, group=me.group)
    rows = 4 // me.world
    found, (product,) = symm_overlap.all_gather_matmul(A, [B], 0, me.group)
    same(found, whole)
    same(product, whole @ B)
    columns, _ = symm_overlap.all_gather_matmul(A, [torch.cat([B] * me.world)], 1, me.group)
    same(columns, torch.cat(whole.chunk(me.world), 1))
    same(symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group), summed[rows * me.rank : rows * (me.rank + 1)])
    same(symm_overlap.matmul_all_reduce(A, B, "avg", me.group), summed / me.world)
    assert used == ["all_gather", "all_gather", "reduce_scatter", "all_reduce"]


def test_an_exchange_takes_one_file_and_a_rule(fresh_ranks):
    fresh_ranks(2).run(2, ops_through_the_library)


def products_are_exact(me):
    import symm_overlap
    from symm_overlap.runtime import backend_of, backends

    backends.CpuBackend = ExactCpuBackend  # the line in runtime/backends.py
    backend_of.cache_clear()
    assert type(backend_of("cpu")) is ExactCpuBackend
    shard = torch.randn(16, 300, generator=torch.Generator().manual_seed(me.rank))
    B = torch.randn(300, 5, generator=torch.Generator().manual_seed(7))
    exact = (gathered(me, shard).double() @ B.double()).float()
    for path in ("sequential", "pipelined"):
        with symm_overlap.force_path(path):
            for return_A in (False, True):
                same(symm_overlap.all_gather_matmul(shard, [B], 0, me.group, return_A=return_A)[1][0], exact)


def test_a_back_end_is_one_class(fresh_ranks):
    fresh_ranks(2).run(2, products_are_exact)


@pytest.mark.parametrize("member", [name for name in vars(Backend) if not name.startswith("_")])
def test_the_back_end_has_every_member_of_the_interface(member):
    assert hasattr(ExactCpuBackend, member)
