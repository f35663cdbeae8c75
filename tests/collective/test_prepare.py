"""After `prepare`, the same calls allocate no symmetric memory, create no group and write nothing to the store."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import symm_overlap
from symm_overlap._torch import group_store, symm_mem
from symm_overlap.plan.layout import ALIGNMENT
from symm_overlap.runtime import NotPreparedError, state_of, symmetric
from symm_overlap.runtime.cpu.workspace import CpuWorkspace
from tests.collective.scaled_cases import needs_row_scales
from tests.collective.test_fake_group import CALLS, forms
from tests.collective.test_fused import fused
from tests.limits import SOON
from tests.nn.blocks import WIDTH, Block, block_plan
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing

FLOAT8 = torch.float8_e4m3fn


@contextmanager
def nothing_is_made(me: Rank) -> Iterator[None]:
    """Assert that inside, this rank allocates no symmetric memory and no rank adds a key to the store."""
    dist.barrier(me.group)
    store = group_store(me.group)
    before = store.num_keys()
    dist.barrier(me.group)
    with mock.patch.object(symm_mem, "empty", side_effect=AssertionError("symmetric memory is allocated")):
        yield
    dist.barrier(me.group)
    after = store.num_keys()
    dist.barrier(me.group)
    assert after == before


def scaled(name: str, world: int, rows: int) -> None:
    """Call the scaled ops with one scale, and with a scale for each row. Scales of rows are gathered first."""
    ops, number = torch.ops.symm_overlap, torch.ones(())
    A, B = torch.empty(rows * world, 32, dtype=FLOAT8), torch.empty(16, 32, dtype=FLOAT8).t()
    of_rows = [] if needs_row_scales.args[0] else [(torch.ones(rows * world, 1), torch.ones(1, 16))]
    for scale, B_scale in ((number, number), *of_rows):
        rest = [None], [None], [torch.bfloat16], [False]
        ops.fused_all_gather_scaled_matmul(A, [B], scale, [B_scale], 0, name, *rest)
        symm_overlap.scaled_matmul_reduce_scatter(A, B, scale, B_scale, "sum", 0, name)


EVERY: dict[str, Callable[[Rank, str | None], object]] = {
    **{
        op: lambda me, path, call=call: forms(call, me.group_name, me.world, path)  # type: ignore[misc]
        for op, call in CALLS.items()
    },
    "scaled": lambda me, path: scaled(me.group_name, me.world, 16),
}


def every_op(me: Rank, path: str | None, first_lane: int) -> None:
    """Run each op forward and backward on its own lane, whose workspace is then no larger than the op needs."""
    kernels = fused() if path == "fused" else nullcontext()
    with kernels, comparing(False), mock.patch.object(symmetric, "_STEP", ALIGNMENT):
        for lane, call in enumerate(EVERY.values(), first_lane):
            with symm_overlap.lane(lane), symm_overlap.force_path(path):
                with symm_overlap.prepare():
                    expected = call(me, path)
                with nothing_is_made(me):
                    assert call(me, path) == expected, "sizes and strides differ"


@pytest.mark.parametrize(
    ("world", "path"),
    one_in(2, [(2, None), (1, None), (3, "pipelined"), (2, "sequential"), (2, "fused"), (2, "c10d")]),
    ids=str,
)
def test_every_op_forward_and_backward_makes_nothing_after_it(
    ranks: Pool, fresh_lane: Callable[[], int], world: int, path: str | None
) -> None:
    ranks.run(world, every_op, path, 1000 * fresh_lane())


class FeedForward(torch.nn.Module):
    """The feed-forward block of a transformer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.norm = group, torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Parameter(torch.ones(16, 64)), torch.nn.Parameter(torch.ones(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden,) = symm_overlap.all_gather_matmul(self.norm(x), [self.up], 1, self.group, return_A=False)
        return symm_overlap.matmul_reduce_scatter(hidden.relu(), self.down, "sum", 1, self.group)


def a_model(me: Rank, lane: int) -> None:
    block = FeedForward(me.group)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    compiled = torch.compile(block, backend=backend)
    compiled(torch.ones(1, 8, 16))
    before_block = len(graphs)
    with comparing(False), symm_overlap.lane(lane):
        block.up.grad = torch.full_like(block.up, 7.0)
        view = torch.ones(4, 4)[:2].requires_grad_()
        before = [each.detach().clone() for each in block.parameters()]
        with symm_overlap.prepare(), mock.patch.object(symm_mem, "empty", side_effect=AssertionError("too early")):
            for run in (block, compiled):
                x = torch.empty(2, 512, 16, requires_grad=True)
                run(x).sum().backward()
                assert x.grad is not None
            symm_overlap.all_gather(view.mul(1), 0, me.group).sum().backward()
            symm_overlap.all_gather(torch.empty(4, 4)[:2].requires_grad_(), 0, me.group).sum().backward()
        assert len(graphs) == before_block > 0, "a graph was compiled for tensors without data"
        assert block.up.grad.unique() == 7.0
        assert [each.grad for each in (view, *block.parameters()) if each is not block.up] == [None] * 4
        assert all(torch.equal(each, old) for each, old in zip(block.parameters(), before, strict=True))
        with nothing_is_made(me):
            block(torch.ones(2, 512, 16, requires_grad=True)).sum().backward()
        assert block.down.grad is not None


def test_a_model_runs_in_the_block_without_effect(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, a_model, fresh_lane())


def a_model_of_dtensors(me: Rank, lane: int) -> None:
    block = parallelize_module(Block(), DeviceMesh.from_group(me.group, "cpu"), block_plan(1))
    with comparing(False), symm_overlap.lane(lane):
        with symm_overlap.prepare():
            block(torch.empty(2, 4, WIDTH, requires_grad=True)).sum().backward()
        assert [each.grad for each in block.parameters()] == [None] * len(list(block.parameters()))
        with nothing_is_made(me):
            block(torch.ones(2, 4, WIDTH, requires_grad=True)).sum().backward()
        assert all(isinstance(each.grad, DTensor) for each in block.parameters())


def test_a_parallelized_model_does_too(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, a_model_of_dtensors, fresh_lane())


def ranks_that_differ(me: Rank, lane: int, compare: bool) -> tuple[str, float]:
    start = time.monotonic()
    with comparing(compare), symm_overlap.lane(lane), pytest.raises(RuntimeError) as raised, symm_overlap.prepare():
        symm_overlap.all_gather(torch.empty((1 + me.rank) << 20), 0, me.group)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("compare", [False, True])
def test_ranks_that_prepare_different_sizes_all_raise_soon(
    ranks: Pool, fresh_lane: Callable[[], int], compare: bool
) -> None:
    for message, seconds in ranks.run(2, ranks_that_differ, fresh_lane(), compare):
        assert seconds < SOON
        if compare:
            assert "rank 1 calls prepare: all_gather((2097152,), gather_dim=0)" in message
        else:
            assert "prepare: " in message
            assert "SYMM_OVERLAP_CHECK=1" in message


def arguments_that_only_torch_knows_are_bad(me: Rank) -> None:
    A, B, one = torch.ones(4, 32).to(FLOAT8), torch.ones(16, 32).to(FLOAT8).t(), torch.ones(())
    biases = [torch.ones(16, dtype=torch.complex64)]  # on CPUs without instructions for float8, torch takes an int32
    for block in (symm_overlap.prepare(), nullcontext()):
        with pytest.raises(ValueError, match="_scaled_mm cannot multiply"), block:
            symm_overlap.all_gather_scaled_matmul(A, [B], one, [one], 0, me.group, biases=biases)


def test_what_only_torch_refuses_is_refused_in_the_block_and_behind_it(ranks: Pool) -> None:
    """Arguments that only torch can reject raise the same error inside `prepare` and after it."""
    ranks.run(2, arguments_that_only_torch_knows_are_bad)


def while_a_graph_is_captured(me: Rank, lane: int) -> None:
    """Test what the host decides: the workspace pretends that a graph is being captured."""
    refused = NotPreparedError("with symm_overlap.prepare():")
    call = re.escape("with symm_overlap.prepare(): all_gather((4, 4), gather_dim=0) of torch.float32")
    symm_overlap.all_gather(torch.ones(4, 4), 0, me.group)  # on another lane, so that the ranks have met
    with comparing(False), symm_overlap.lane(lane):
        with mock.patch.object(CpuWorkspace, "require_preparable", side_effect=refused) as asked:
            with pytest.raises(NotPreparedError, match=call):
                symm_overlap.all_gather(torch.ones(4, 4), 0, me.group)
            with mock.patch.dict(state_of(me.group).direct, clear=True), pytest.raises(NotPreparedError):
                symm_overlap.all_gather(torch.ones(5, 4), 0, me.group)
            assert "whose memory they reach" in asked.call_args.args[0]
        with symm_overlap.prepare():
            symm_overlap.all_gather(torch.empty(4, 4), 0, me.group)
        with mock.patch.object(CpuWorkspace, "require_preparable", side_effect=refused):
            symm_overlap.all_gather(torch.ones(4, 4), 0, me.group)


def test_what_cannot_be_made_in_a_capture_is_told_with_the_call_to_prepare(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    """If a captured call needs something new, the error names the call to put into `prepare`."""
    ranks.run(2, while_a_graph_is_captured, fresh_lane())


def values_are_asked_for(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane):
        with pytest.raises(Exception, match=r"aten\._local_scalar_dense") as raised, symm_overlap.prepare():
            float(symm_overlap.all_reduce(torch.ones(()), "sum", me.group))
        assert "DataDependent" in type(raised.value).__name__
        assert state_of(me.group).lane(me.group, me.device, lane).workspace.half == 0
        found: Any = symm_overlap.all_reduce(torch.ones(()), "sum", me.group)
        assert found == me.world


def test_a_block_that_raises_makes_nothing_and_leaves_the_lane_in_step(
    ranks: Pool, fresh_lane: Callable[[], int]
) -> None:
    """If a `prepare` block raises, no memory is allocated and the lane stays usable."""
    ranks.run(2, values_are_asked_for, fresh_lane())
