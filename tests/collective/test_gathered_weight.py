"""Matmuls with a weight that arrives in shards: values on every path, rows that differ between ranks, memory use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import symm_overlap
from symm_overlap import _C
from symm_overlap.runtime.cpu.backend import CpuBackend
from tests.collective import reference as ref
from tests.ranks import Pool, Rank
from tests.transforms import choices, comparing, in_place

ops = torch.ops.symm_overlap
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Whether shards are multiplied in place (if not, they are copied, as on a GPU), then path, chunks and streams.
WAYS = [
    (True, None, None, None),
    (True, "sequential", 1, 1),
    (True, "pipelined", 3, 2),
    (False, "sequential", 1, 1),
    *((False, "pipelined", chunks, streams) for chunks in (1, 2, 4) for streams in (1, 2)),
    (True, "c10d", None, None),
    (True, "c10d", 2, 1),
]
SHARD = 5, 6


def shards_of(me: Rank, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [ref.binary(SHARD, dtype, seed=seed + rank) for rank in range(me.world)]


def exact(me: Rank, lane: int) -> None:
    """Inputs are zeros and ones, so every sum is exact. Rows differ between ranks and calls, and there may be none."""
    number = 0
    for (here, path, chunks, streams), dtype in zip(2 * WAYS, itertools.cycle(DTYPES), strict=False):
        with in_place(here), symm_overlap.lane(lane), symm_overlap.force_path(path, chunks=chunks, streams=streams):
            for dim, transpose in itertools.product(range(2), (False, True)):
                number += 1
                shards = shards_of(me, dtype, number)
                weight = torch.cat(shards, dim)
                right = weight.t() if transpose else weight
                lead = [(3,), (), (me.rank, 2), (2, 2 + me.rank), (5,)][(number + me.rank) % 5]
                X, G = (ref.binary((*lead, size), dtype, seed=50 + me.rank) for size in right.shape)
                X.requires_grad_()
                shard = shards[me.rank]
                if number % 3 == 0:  # not contiguous
                    shard = shard.t().contiguous().t()
                shard = shard.detach().requires_grad_()
                y = symm_overlap.all_gather_weight_matmul(X, shard, dim, me.group, transpose=transpose)
                ref.same(y.detach(), X.detach() @ right)
                y.backward(G)
                assert torch.equal(X.grad, G @ right.t())
                left, behind = (G, X.detach()) if transpose else (X.detach(), G)
                total = left.reshape(-1, left.shape[-1]).double().t() @ behind.reshape(-1, behind.shape[-1]).double()
                dist.all_reduce(total := total.contiguous(), group=me.group)
                assert torch.equal(shard.grad.double(), total.chunk(me.world, dim)[me.rank])


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_exact_values_and_gradients_on_every_path(ranks: Pool, fresh_lane: Callable[[], int], world: int) -> None:
    ranks.run(world, exact, fresh_lane())


def rows_change(me: Rank, path: str) -> None:
    """What is cached by the first call serves later calls with any number of rows."""
    shards = shards_of(me, torch.float32)
    weight = torch.cat(shards)
    for number, rows in enumerate((3, 0, 7, 2, 7)):
        X, G = (ref.binary((rows + me.rank, size), torch.float32, seed=number + me.rank) for size in weight.shape)
        with symm_overlap.force_path(path):
            y = symm_overlap.all_gather_weight_matmul(X, shards[me.rank], 0, me.group)
            grad = ops.weight_grad_reduce_scatter(X, G, "sum", 0, me.group_name)
        assert torch.equal(y, X @ weight)
        dist.all_reduce(total := X.t() @ G, group=me.group)
        assert torch.equal(grad, total.chunk(me.world)[me.rank])


@pytest.mark.parametrize("path", ["sequential", "pipelined"])
def test_rows_may_change_from_call_to_call(ranks: Pool, path: str) -> None:
    ranks.run(3, rows_change, path)


def rounded_once(me: Rank) -> float:
    """Return the error of a sum of ones and many small numbers over shards. Sums in bfloat16 would lose the latter."""
    X = torch.ones(1, 2 * me.world, dtype=torch.bfloat16)
    shard = torch.full((2, 1), 1.0 if me.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    with symm_overlap.force_path("pipelined", chunks=2):
        y = symm_overlap.all_gather_weight_matmul(X, shard, 0, me.group)
    exactly = 2 + 2 * (me.world - 1) * 2.0**-9
    return abs(float(y) - float(torch.tensor(exactly).bfloat16()))


def test_half_precision_is_added_up_in_float32(ranks: Pool) -> None:
    assert ranks.run(5, rounded_once) == [0.0] * 5


def symmetric(me: Rank) -> None:
    """A shard in symmetric memory is read in place and never copied."""
    memory = symm_mem.empty(64, dtype=torch.float32, device="cpu")
    symm_mem.rendezvous(memory, me.group_name)
    shards = shards_of(me, torch.float32)
    mine = memory[me.rank : me.rank + shards[0].numel()].view(SHARD).copy_(shards[me.rank])  # offsets differ
    for path, (dim, transpose) in itertools.product(("pipelined", "sequential"), itertools.product((0, 1), repeat=2)):
        right = torch.cat(shards, dim).t() if transpose else torch.cat(shards, dim)
        X = ref.binary((2 + me.rank, right.shape[0]), torch.float32, seed=me.rank)
        with symm_overlap.force_path(path), mock.patch.object(CpuBackend, "copy", side_effect=AssertionError):
            y = symm_overlap.all_gather_weight_matmul(X, mine, dim, me.group, transpose=bool(transpose))
        ref.same(y, X @ right)


@pytest.mark.parametrize("world", [2, 3])
def test_a_shard_in_symmetric_memory_is_not_copied(ranks: Pool, world: int) -> None:
    ranks.run(world, symmetric)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest new tensor, and of all new tensors, that torch's ops create."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "symm_overlap":  # also see the ops that its kernel calls
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        for each in _tensors(found):
            if each.untyped_storage().data_ptr() not in given:  # not a view
                self.note(each.untyped_storage().nbytes())
        return found

    def note(self, nbytes: int) -> None:
        self.largest, self.total = max(self.largest, nbytes), self.total + nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, Tensor)]


@contextmanager
def watched() -> Iterator[Largest]:
    """Yield a record of the tensors that a call creates, with torch's ops or as outputs of the back end."""
    seen = Largest()

    def new_output(self: Any, like: Tensor, *shape: int) -> Tensor:
        made = _C.new_output(like, shape)
        seen.note(made.nbytes)
        return made

    with mock.patch.object(CpuBackend, "new_output", new_output), seen:
        yield seen


def memory(me: Rank) -> dict[str, tuple[int, int, int]]:
    """Return bytes by the way in which the weight arrives.

    They are those of the largest new tensor, of all new tensors, and of half of the workspace.
    """
    found = {}
    group = dist.new_group(list(range(me.world)))  # its workspace has not grown in other tests
    shard, X = torch.ones(512, 512), torch.ones(2, 512)
    ways = [("in place", True, "pipelined", 1), ("at once", True, "sequential", 1), ("ring", False, "pipelined", 2)]
    for name, here, path, chunks in [*ways, ("c10d", True, "c10d", 1)]:
        with in_place(here), comparing(False), symm_overlap.force_path(path, chunks=chunks), watched() as seen:
            symm_overlap.all_gather_weight_matmul(X, shard, 0, group, transpose=True)
        lane = _lane(group)
        found[name] = seen.largest, seen.total, lane.workspace.half
    return found


def _lane(group: dist.ProcessGroup) -> Any:
    from symm_overlap.runtime import state_of

    return state_of(group).lane(group, torch.device("cpu"), 0)


def test_the_whole_weight_never_exists(ranks: Pool) -> None:
    """Besides the local shard, memory holds half of the workspace for peers and, if shards are copied, two chunks."""
    world, shard = 5, 512 * 512 * 4  # as large as half of the smallest workspace
    product = 2 * world * 512 * 4
    for found in ranks.run(world, memory):
        for way in ("in place", "at once"):
            largest, total, half = found[way]
            assert total <= 2 * product, "only outputs may be created"
            assert half == shard
        largest, total, half = found["ring"]
        assert shard <= total <= shard + 2 * product, "two chunks of half a shard"
        assert largest <= shard
        assert half == shard
        assert found["c10d"][0] >= world * shard, "the record must show a gathered weight"


def chosen_alike(me: Rank) -> list[tuple[str, object]]:
    with choices() as made:
        for rows in (me.rank, 300 * me.rank, 5000):
            X = torch.ones(rows, 300, requires_grad=True)
            shard = torch.ones(300, 300, requires_grad=True)
            symm_overlap.all_gather_weight_matmul(X, shard, 0, me.group, transpose=True).sum().backward()
    return [(op, str(choice)) for op, choice in made]


def test_the_path_does_not_depend_on_rows_that_differ(ranks: Pool) -> None:
    found = ranks.run(2, chosen_alike)
    assert found[0] == found[1]
    assert {op for op, _ in found[0]} == {"all_gather_weight_matmul", "weight_grad_reduce_scatter"}
    assert len(set(found[0])) == 2
    assert "pipelined" in found[0][0][1]


def test_on_a_gpu_the_size_of_the_whole_weight_decides() -> None:
    for n, path in ((16384, "pipelined"), (256, "sequential")):
        sizes = {"m": 4096, "n": n, "dtype": torch.bfloat16, "device": "cuda"}
        for op in ("all_gather_weight_matmul", "weight_grad_reduce_scatter"):
            choice = symm_overlap.explain(op, world=2, **sizes)
            assert choice.path == path, str(choice)
    few = symm_overlap.explain("all_gather_weight_matmul", m=300, n=4096, world=2, device="cpu")
    assert "rows of the weight" in few.reason


def other_shard(me: Rank, lane: int) -> str:
    shard = torch.ones(4 + (me.rank == 1), 6)
    with symm_overlap.lane(lane), comparing(False), symm_overlap.timeout(20), pytest.raises(RuntimeError) as raised:
        symm_overlap.all_gather_weight_matmul(torch.ones(3, 6), shard, 0, me.group, transpose=True)
    return str(raised.value)


def test_shards_of_other_shapes_are_told(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    """If shards have different shapes, every rank raises an error that recommends SYMM_OVERLAP_CHECK=1."""
    for message in ranks.run(2, other_shard, fresh_lane()):
        assert "SYMM_OVERLAP_CHECK=1" in message


def bad_reduction(me: Rank) -> None:
    with pytest.raises(ValueError, match=r"^grad_reduce_op is 'max': allowed are"):
        symm_overlap.all_gather_weight_matmul(torch.ones(2, 4), torch.ones(4, 4), 0, me.group, grad_reduce_op="max")


def test_gradients_are_summed_or_averaged(ranks: Pool) -> None:
    ranks.run(1, bad_reduction)


def bad_dimension(me: Rank) -> None:
    with pytest.raises(ValueError, match="scatter_dim is 2, but a weight has dimensions -2 to 1"):
        ops.weight_grad_reduce_scatter(torch.ones(2, 4), torch.ones(2, 4), "sum", 2, me.group_name)


def test_a_gradient_has_two_dimensions(ranks: Pool) -> None:
    ranks.run(1, bad_dimension)
