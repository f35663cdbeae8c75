"""The C++ program that runs a plan without Python does the same as the steps' Python functions, called one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap import _C
from symm_overlap.plan import Plan, Table
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.runtime.script import Script
from symm_overlap.settings import transformed
from tests.collective.scaled_cases import E4M3, ONE
from tests.ranks import Pool, Rank
from tests.runtime.described_calls import all_calls
from tests.runtime.symmetric import make
from tests.transforms import comparing, make_room

DTYPES = torch.float64, torch.bfloat16


def unchanged(plan: Plan, table: Table) -> Table:
    """A step transform that changes nothing. With any transform, Python runs the steps one by one."""
    return table


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value if item is not None for tensor in tensors_in(item)]


def same_bits(me: Rank, lane: int, path: str, chunks: int) -> None:
    every = {
        f"{name} of {dtype}": call for dtype in DTYPES for name, call in all_calls(me.group, me.rank, dtype).items()
    }
    for name, call in every.items():
        with symm_overlap.lane(lane), symm_overlap.force_path(path, chunks=chunks):
            found = [tensors_in(call()) for _ in range(3)]  # in both halves: the first use and a reuse
            with transformed(unchanged):
                expected = tensors_in(call())
        for tensors in found:
            assert len(tensors) == len(expected)
            for one, other in zip(tensors, expected, strict=True):
                assert torch.equal(one, other), name
                assert one.stride() == other.stride(), name


@pytest.mark.parametrize(("world", "path", "chunks"), [(3, "sequential", 1), (3, "pipelined", 1), (2, "pipelined", 3)])
def test_a_plan_gives_the_same_bits_with_and_without_python(
    ranks: Pool, fresh_lane: Callable[[], int], world: int, path: str, chunks: int
) -> None:
    ranks.run(world, same_bits, fresh_lane(), path, chunks)


def what_python_runs(me: Rank, lane: int, path: str) -> dict[str, set[str]]:
    """Return, by call, the kinds of steps for which Python was called. Calls without such steps are left out.

    It makes no difference that the back end's methods are replaced while the lane is made, as other tests do.
    """
    with mock.patch.object(CpuBackend, "multiply", staticmethod(lambda *arguments: None)), symm_overlap.lane(lane):
        symm_overlap.all_gather(torch.ones(1, 1), 0, me.group)
    found: dict[str, set[str]] = {}
    kinds: set[str] = set()
    original = Script.run

    def watched(script: Script, op: str, tensors: Any, table: Table) -> None:
        def noting(kind: str, function: Callable[..., object]) -> Callable[..., object]:
            return lambda step: (kinds.add(kind), function(step))

        original(script, op, tensors, {kind: noting(kind, function) for kind, function in table.items()})

    Script.run = watched  # type: ignore[method-assign]
    try:
        with symm_overlap.lane(lane), symm_overlap.force_path(path, chunks=2 if path == "pipelined" else None):
            every = all_calls(me.group, me.rank, torch.bfloat16) | {"symmetric": lambda: symmetric_input(me)}
            for name, call in every.items():
                kinds.clear()
                call()
                if kinds:
                    found[name] = set(kinds)
    finally:
        Script.run = original  # type: ignore[method-assign]
    return found


def symmetric_input(me: Rank) -> None:
    shard, _ = make(me.group, 4, dtype=torch.float32)
    symm_overlap.all_gather(shard.view(2, 2), 0, me.group)


# In each call, a peer announces where in symmetric memory its input is. Python reads this before it creates views.
FOUND = {"symmetric": {"announce", "pull"}}


@pytest.mark.parametrize(
    ("path", "python"),
    [
        # If shards are multiplied in place, the back end decides by the strides of the weight how to multiply them.
        ("sequential", {"matmul, nothing kept": {"consume"}, **FOUND}),
        ("pipelined", FOUND),
    ],
)
def test_python_is_called_only_for_work_that_is_not_described_as_data(
    ranks: Pool, fresh_lane: Callable[[], int], path: str, python: dict[str, set[str]]
) -> None:
    """The program calls Python only for steps whose work is not described as data."""
    for found in ranks.run(2, what_python_runs, fresh_lane(), path):
        assert found == python


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
    """Pass the same tensor twice, then different ones. A reused program must not confuse one operand with another."""
    A, B, C = (torch.full((4, 4), value) for value in (1.0, 2.0, 3.0))
    for Bs in ([B, B], [B, B], [B, C], [C, B], [B, C], [A, A], [A, C], [B, A], [C, C]):
        gathered, products = symm_overlap.all_gather_matmul(A, Bs, 0, me.group)
        assert gathered is not None
        for weight, product in zip(Bs, products, strict=True):
            assert torch.equal(product, gathered @ weight)


def test_a_tensor_that_is_two_operands_in_one_call_need_not_be_in_the_next(ranks: Pool) -> None:
    ranks.run(2, one_tensor_in_two_places)


def operands_of_other_strides(me: Rank) -> None:
    """Make calls of the same kind whose operands have other strides and other addresses in every call."""
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


def calls_with_and_without_a_bias(me: Rank) -> None:
    """For the chooser and for the peers these calls are equal, but their steps differ."""
    A, B = (torch.ones(16, 16).to(E4M3) for _ in range(2))
    bias, wide = torch.arange(16.0).bfloat16(), torch.arange(32.0).bfloat16()
    for given in (None, bias, None, wide[::2], bias + 1, None):
        _, (product,) = symm_overlap.all_gather_scaled_matmul(A, [B], ONE, [ONE], 0, me.group, biases=[given])
        part = symm_overlap.scaled_matmul_reduce_scatter(A, B, ONE, ONE, "sum", 1, me.group, bias=given)
        added = torch.zeros(16) if given is None else given.float()
        assert torch.equal(product.float(), 16 + added.expand(16 * me.world, 16))
        assert torch.equal(part.float(), me.world * (16 + added.chunk(me.world)[me.rank].expand_as(part)))


def test_a_bias_that_only_some_calls_have_is_not_forgotten(ranks: Pool) -> None:
    ranks.run(2, calls_with_and_without_a_bias)


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (1, 0), (2, 2)])
def test_a_program_issues_no_items_that_it_does_not_have(ranks: Pool, begin: int, end: int) -> None:
    """A range of items outside the program raises IndexError, and nothing runs."""
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
    """A symmetric input, which peers read in place, may have another address in each call."""
    ranks.run(world, moving_symmetric_inputs)


def barriers(me: Rank) -> list[bool]:
    """Return whether this rank sees a flag after each barrier. The last rank sets it late, just before the barrier."""
    make_room(me.group, 1)
    from symm_overlap.runtime.group import state_of

    workspace = state_of(me.group).lane(me.group, me.device, 0).workspace
    flags, handle = make(me.group, 4, dtype=torch.int64)
    flags.zero_()
    dist.barrier(me.group)
    there = handle.get_buffer(me.world - 1, [4], torch.int64)
    driver, seen = _C.CpuDriver(workspace._lane), []
    program = _C.Program()
    program.barrier(0, 1)
    workspace._lane.begin(60_000)
    for turn in range(4):
        if me.rank == me.world - 1:
            time.sleep(0.01)
            flags[turn] = 1
        program.run(driver, [], 0, 1)
        seen.append(bool(there[turn]))
    dist.barrier(me.group)
    return seen


def test_a_barrier_in_a_program_waits_for_every_rank(ranks: Pool) -> None:
    assert ranks.run(3, barriers) == [[True] * 4] * 3
