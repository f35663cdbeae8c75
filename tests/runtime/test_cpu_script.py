"""What runs a plan without Python does what the steps' functions do one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap import _C
from symm_overlap.collective.planners.published import torch_all_gather_matmul
from symm_overlap.plan import Plan, Table
from symm_overlap.runtime.script import Script
from symm_overlap.settings import transformed
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import make
from tests.transforms import comparing, make_room


def unchanged(plan: Plan, table: Table) -> Table:
    """A transform that changes nothing; with any transform, steps are run one by one."""
    return table


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value if item is not None for tensor in tensors_in(item)]


def calls(me: Rank) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(me.rank)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A, B, wide, tall = of(2, 12, 6), of(6, 10), of(me.world * 6, 10), of(12 * me.world, 6)
    group = me.group
    return {
        **{f"all_gather {dim}": lambda dim=dim: symm_overlap.all_gather(A, dim, group) for dim in range(3)},
        **{f"matmul {dim}": lambda dim=dim: symm_overlap.all_gather_matmul(A, [B], dim, group) for dim in range(2)},
        "matmul last": lambda: symm_overlap.all_gather_matmul(A, [wide], 2, group),
        "matmul, nothing kept": lambda: symm_overlap.all_gather_matmul(A, [B], 1, group, return_A=False),
        "one column": lambda: symm_overlap.all_gather(A[:, :, :1], 2, group),
        "reduce_scatter": lambda: symm_overlap.reduce_scatter(tall, "sum", 0, group),
        "matmul_reduce_scatter": lambda: symm_overlap.matmul_reduce_scatter(tall, B, "avg", 0, group),
        "all_reduce": lambda: symm_overlap.all_reduce(A, "sum", group),
        "matmul_all_reduce": lambda: symm_overlap.matmul_all_reduce(A, B, "sum", group),
    }


def same_bits(me: Rank, lane: int, path: str, chunks: int) -> None:
    for name, call in calls(me).items():
        with symm_overlap.lane(lane), symm_overlap.force_path(path, chunks=chunks):
            found = [tensors_in(call()) for _ in range(4)]  # both halves, made ready and used again
            with transformed(unchanged):
                expected = tensors_in(call())
        for tensors in found:
            assert len(tensors) == len(expected)
            for one, other in zip(tensors, expected, strict=True):
                assert torch.equal(one, other), name
                assert one.stride() == other.stride(), name


@pytest.mark.parametrize(("path", "chunks"), [("sequential", 1), ("pipelined", 1), ("pipelined", 3)])
@pytest.mark.parametrize("world", [2, 3])
def test_a_plan_gives_the_same_bits_with_and_without_python(
    ranks: Pool, fresh_lane: Callable[[], int], world: int, path: str, chunks: int
) -> None:
    ranks.run(world, same_bits, fresh_lane(), path, chunks)


def what_python_runs(me: Rank, lane: int) -> dict[str, list[str]]:
    """The kinds of steps for which Python was called. The lane is fresh: one that was made while a test watched what
    the back end computes asks Python for every step.
    """
    found: dict[str, list[str]] = {}
    original = Script.run

    def watched(script: Script, op: str, tensors: Any, table: Table) -> None:
        def noting(kind: str, function: Callable[..., object]) -> Callable[..., object]:
            return lambda step: (found[op].append(kind), function(step))

        found[op] = []
        original(script, op, tensors, {kind: noting(kind, function) for kind, function in table.items()})

    Script.run = watched  # type: ignore[method-assign]
    try:
        with symm_overlap.lane(lane), symm_overlap.force_path("sequential"):
            for call in calls(me).values():
                call()
    finally:
        Script.run = original  # type: ignore[method-assign]
    return found


def test_python_is_called_only_for_work_that_is_not_told_as_data(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    for found in ranks.run(2, what_python_runs, fresh_lane()):
        assert found == {
            "all_gather": [],
            "all_gather_matmul": ["consume"],  # of shards, where they lie
            "reduce_scatter": [],
            "matmul_reduce_scatter": [],
            "all_reduce": [],
            "matmul_all_reduce": [],
        }


def late_peer(me: Rank, lane: int) -> list[str]:
    X = torch.ones(4, 4)
    with comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(0.3):
        symm_overlap.all_gather(X, 0, me.group)
        if me.rank == 1:
            dist.barrier(me.group)
            return []
        with pytest.raises(dist.DistBackendError, match="all_gather: symm_overlap: wait_signal on rank 0") as caught:
            symm_overlap.all_gather(X, 0, me.group)
        dist.barrier(me.group)
    return list(getattr(caught.value, "__notes__", [])) or [str(caught.value)]


def test_a_failed_wait_names_its_step(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    notes, _ = ranks.run(2, late_peer, fresh_lane())
    assert "in the plan's step: wait chunk 1.0 for rank 1 channel 0 [ready] on compute0" in notes[0]


def failing_consumer(me: Rank) -> str:
    A, B = torch.ones(4, 4), torch.ones(4, 4)
    symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)
    original = Script.run

    def broken(script: Script, op: str, tensors: Any, table: Table) -> None:
        def fail(step: object) -> None:
            raise ArithmeticError("no more numbers")

        original(script, op, tensors, {**table, "consume": fail})

    group = dist.new_group(list(range(me.world)))
    Script.run = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(ArithmeticError, match="no more numbers") as caught:
            symm_overlap.all_gather_matmul(A, [B], 0, group, return_A=False)
    finally:
        Script.run = original  # type: ignore[method-assign]
    return str(getattr(caught.value, "__notes__", caught.value.args))


def test_a_failed_computation_names_its_step(fresh_ranks: Callable[..., Pool]) -> None:
    for note in fresh_ranks(2).run(2, failing_consumer):
        assert "in the plan's step: consume on compute0" in note


def one_tensor_in_two_places(me: Rank) -> None:
    """First the same tensor twice, then others: what was made ready must not mistake one for the other."""
    A, B, C = (torch.full((4, 4), value) for value in (1.0, 2.0, 3.0))
    for Bs in ([B, B], [B, B], [B, C], [C, B], [B, C], [A, A], [A, C], [B, A], [C, C]):
        gathered, products = symm_overlap.all_gather_matmul(A, Bs, 0, me.group)
        assert gathered is not None
        for weight, product in zip(Bs, products, strict=True):
            assert torch.equal(product, gathered @ weight)


def test_a_tensor_that_is_two_operands_in_one_call_need_not_be_in_the_next(ranks: Pool) -> None:
    ranks.run(2, one_tensor_in_two_places)


def operands_of_other_strides(me: Rank) -> None:
    """Calls of one sort whose operands lie otherwise in memory, and elsewhere, in every call."""
    generator = torch.Generator().manual_seed(3)
    for call in range(8):
        X, B = torch.randn(8, 12, generator=generator), torch.randn(12, 6, generator=generator)
        A = X[:, ::2] if call % 2 else X[:, :6].contiguous()
        B = B.t() if call % 3 else B.t().contiguous()
        found = symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)
        with transformed(unchanged):
            assert torch.equal(found, symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group))
        torch.testing.assert_close(found, me.world * (A @ B).chunk(me.world)[me.rank])
        found = symm_overlap.reduce_scatter(A, "avg", 0, me.group)
        torch.testing.assert_close(found, A.chunk(me.world)[me.rank])


@pytest.mark.parametrize("world", [2, 4])
def test_operands_may_have_other_strides_in_the_next_call(ranks: Pool, world: int) -> None:
    ranks.run(world, operands_of_other_strides)


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (1, 0), (2, 2)])
def test_a_program_issues_no_items_that_it_does_not_have(ranks: Pool, begin: int, end: int) -> None:
    ranks.run(2, items_out_of_range, begin, end)


def items_out_of_range(me: Rank, begin: int, end: int) -> None:
    make_room(me.group, 1)
    from symm_overlap.runtime.group import state_of

    lane = state_of(me.group).lane(me.group, me.device, 0).workspace._lane
    program, driver = _C.Program(), _C.CpuDriver(lane)
    X = torch.arange(3.0)
    program.copy(0, (0, 4), (0, 0), (1, 4, 0, 0))
    with pytest.raises(IndexError, match=f"a program of 1 items has no items {begin} to {end}"):
        program.run(driver, [X], begin, end)
    with pytest.raises(IndexError):
        program.run(driver, [], 0, 1)  # without the tensor
    program.run(driver, [X], 0, 1)
    assert X.tolist() == [0.0, 0.0, 2.0]


def moving_symmetric_inputs(me: Rank) -> None:
    tensor, _ = make(me.group, 64, dtype=torch.float32)
    for call, start in enumerate([0, 16, 16, 48, 0, 32]):
        shard = tensor[(start + 16 * me.rank) % 64 :][:16].view(4, 4).fill_(10.0 * call + me.rank)
        dist.barrier(me.group)
        found = symm_overlap.all_gather(shard, 0, me.group)
        assert found[::4, 0].tolist() == [10.0 * call + rank for rank in range(me.world)]


@pytest.mark.parametrize("world", [2, 3])
def test_an_input_that_peers_read_where_it_lies_may_lie_elsewhere_in_the_next_call(ranks: Pool, world: int) -> None:
    ranks.run(world, moving_symmetric_inputs)


def test_a_plan_with_barriers_is_refused() -> None:
    plan = torch_all_gather_matmul(0, 2)
    streams = {name: number for number, name in enumerate(plan.streams)}
    with pytest.raises(ValueError, match="a script has no barriers"):
        Script(None, plan, lambda region: None, {}, (), lambda step: None, lambda tensor: True, streams)  # type: ignore[arg-type,return-value]
