"""Calls that repeat an earlier one: they compute the same, notice what has changed, and fail in the same way."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from bench.harness.unrepeated import unrepeated
from symm_overlap.collective.exchange import repeated
from symm_overlap.collective.exchange.repeated import Repeated
from symm_overlap.runtime import state_of
from tests.collective.gradient_cases import CASES, Case, Inputs
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing, in_place, poisoned_outputs

CALLS = 6


@contextmanager
def counted(ops: set[str] | None = None) -> Iterator[list[bool]]:
    """Yield a list to which each call adds whether it was repeated, if calls of its kind can be. Add the names of the
    ops that were repeated to ``ops``.
    """
    found: list[bool] = []
    original = Repeated.call

    def call(self: Repeated, *args: object) -> object:
        result = original(self, *args)  # type: ignore[arg-type]
        found.append(result is not repeated._NOT_NOW)
        if found[-1] and ops is not None:
            ops.add(self._op)
        return result

    with mock.patch.object(Repeated, "call", call):
        yield found


def small_integers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def check(
    me: Rank, case: Case, seed: int, around: AbstractContextManager[object], dtype: torch.dtype = torch.float64
) -> None:
    """Compare one call, and its gradients, with plain PyTorch. Averages are rounded, all else is exact."""

    def agree(found: Tensor, wanted: Tensor) -> None:
        tolerance = 100 * torch.finfo(dtype).eps * (case.reduce_op == "avg")
        wanted = wanted.to(dtype)
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=tolerance, msg=lambda text: f"{case}: {text}")

    inputs: list[Inputs] = [
        [
            small_integers(shape, 1000 * seed + 100 * rank + index).requires_grad_()
            for index, shape in enumerate(case.shapes(rank, me.world))
        ]
        for rank in range(me.world)
    ]
    expected = case.plain(inputs)
    mine = [each.detach().to(me.device, dtype).requires_grad_() for each in inputs[me.rank]]
    with around:
        outputs = case.run(mine, me)
    for found, wanted in zip(outputs, expected[me.rank], strict=True):
        agree(found, wanted)
    with around:
        grads = torch.autograd.grad([each.sum() for each in outputs], mine, allow_unused=True)
    total = torch.stack([each.sum() for outputs in expected for each in outputs]).sum()
    for grad, wanted in zip(grads, torch.autograd.grad(total, inputs[me.rank], allow_unused=True), strict=True):
        assert (grad is None) == (wanted is None)
        if grad is not None:
            agree(grad, wanted)


def every_case(me: Rank, path: str, chunks: int | None, like_gpus: bool) -> tuple[dict[str, int], set[str]]:
    """Return, for each kind of case, how many calls of ops were repeated, and which ops. Two kinds cannot be."""
    hits: dict[str, int] = {}
    ops: set[str] = set()
    with comparing(False), symm_overlap.force_path(path, chunks=chunks), in_place(not like_gpus):
        for case in CASES:
            with counted(ops) as found:
                for number in range(CALLS):
                    check(me, case, number, poisoned_outputs() if number % 2 else nullcontext())
            hits[type(case).__name__] = hits.get(type(case).__name__, 0) + sum(found)
    return hits, ops


@pytest.mark.parametrize("world", one_in(2, [2, 3]))
@pytest.mark.parametrize("path", [("sequential", None), ("pipelined", 1), ("pipelined", 2)], ids=str)
def test_repeated_calls_compute_what_the_first_one_did(ranks: Pool, path: tuple[str, int | None], world: int) -> None:
    hits, ops = ranks.run(world, every_case, *path, True, timeout=120)[0]
    assert ops == {f"{one}{another}" for one in ("", "matmul_") for another in ("reduce_scatter", "all_reduce")} | {
        "all_gather",
        "all_gather_matmul",
    }
    assert {kind for kind, count in hits.items() if count == 0} == {"GatherWeight", "ScatterWeightGrad"}, hits


def test_repeated_calls_that_read_the_memory_of_peers(ranks: Pool) -> None:
    assert sum(ranks.run(2, every_case, "pipelined", 2, False, timeout=120)[0][0].values()) > 0


def gathers(me: Rank, A: Tensor) -> list[bool]:
    """Gather a tensor, and return for each call of a kind that can be repeated whether it was."""
    expected = [torch.empty(A.shape, dtype=A.dtype) for _ in range(me.world)]
    dist.all_gather(expected, A.contiguous(), group=me.group)
    with counted() as found:
        result = symm_overlap.all_gather(A, 0, me.group)
    assert torch.equal(result, torch.cat(expected))
    return found


def changes_are_noticed(me: Rank, lane: int) -> None:
    ones = torch.ones(8, 6, dtype=torch.float64)
    with comparing(False), in_place(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=1):
        kind = lambda number: ones * (10 * number + me.rank)  # noqa: E731
        for number in range(3):
            gathers(me, kind(number))
        assert gathers(me, kind(3)) == [True]
        # A tensor in symmetric memory is read in place, and one in other memory is copied first.
        mine = symm_overlap.empty(8, 6, dtype=torch.float64, group=me.group)
        for number in range(4):
            mine.copy_(kind(number))
            gathers(me, mine)
            gathers(me, kind(number))
        # A copy of the argument is made in every call.
        for number in range(4):
            assert gathers(me, kind(number).t().contiguous().t()) == []
        # The workspace grows.
        gathers(me, torch.full((1 << 19, 6), float(me.rank)))
        assert gathers(me, kind(5)) == [False]
        gathers(me, kind(6))
        assert gathers(me, kind(7)) == [True]
        # Nothing is repeated while somebody looks at single steps, or only asks what a call needs.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert gathers(me, kind(8)) == []
        with symm_overlap.prepare():
            symm_overlap.all_gather(kind(9), 0, me.group)
        with comparing(True):
            assert gathers(me, kind(10)) == []
        with unrepeated():
            assert gathers(me, kind(10)) == []
        with torch.inference_mode():
            assert [bool(gathers(me, kind(number))) for number in range(3)] == [False, True, True]
        gathers(me, kind(11))
        # If tuning has measured something, the next call chooses anew.
        state_of(me.group).forget_routes()
        assert gathers(me, kind(12)) == []


def test_what_changes_between_calls_is_noticed(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, changes_are_noticed, fresh_lane())


def arguments_in_one_storage(me: Rank, lane: int) -> None:
    """The arguments are views of one tensor in some of the calls, at other places in every call."""
    with comparing(False), in_place(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=1):
        for number in range(12):
            both = small_integers((40, 4), number)
            A, B = both[number % 6 : number % 6 + 12].view(3, 4, 4), both[number % 8 : number % 8 + 4]
            if number % 2 or number < 4:
                A, B = A.clone(), B.clone()
            with counted() as calls:
                found = symm_overlap.matmul_all_reduce(A, B, "sum", me.group)
            assert torch.equal(found, me.world * (A @ B))
            assert number < 3 or calls == [True]
            square = both[:4].clone()
            other = square if number % 2 else both[4:8].clone()
            found = symm_overlap.matmul_all_reduce(square, other, "sum", me.group)
            assert torch.equal(found, me.world * (square @ other))
            # The first factors are given to the script as views. In the first calls they share one storage.
            first, second = both[8:24].view(4, 4, 4), both[24:40].view(4, 4, 4)
            if number > 3:
                first, second = first.clone(), second.clone()
            found = torch.ops.symm_overlap.fused_matmuls_reduce_scatter(
                [first, second], [B, other], None, "sum", 0, me.group_name
            )
            expected = me.world * (first @ B + second @ other)
            assert torch.equal(found, expected.chunk(me.world)[me.rank])


def test_arguments_may_share_memory_or_be_the_same_tensor(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, arguments_in_one_storage, fresh_lane())


def results_are_separate(me: Rank, lane: int) -> None:
    """A result belongs to the caller: it keeps its values, may be written to, and is what autograd expects."""
    with comparing(False), in_place(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=1):
        kept = []
        for number in range(8):
            A = torch.full((4, 6), float(number), requires_grad=number % 2 == 1)
            with counted() as calls:
                result = symm_overlap.all_gather(A, 0, me.group)
            assert number < 3 or calls == [True]
            assert result._base is None
            assert result.untyped_storage().nbytes() == result.nbytes
            kept.append(result.detach())
        for number, result in enumerate(kept):
            assert result.unique().tolist() == [number]
            result.add_(1)


def test_a_result_belongs_to_the_caller(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, results_are_separate, fresh_lane())


def fails_in_a_repeated_call(me: Rank, lane: int) -> None:
    A = torch.ones(4, 4)
    with comparing(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined"):
        for number in range(4):
            with counted() as calls:
                symm_overlap.all_reduce(A, "sum", me.group)
            assert number < 3 or calls == [True]
        if me.rank == 0:
            with (
                symm_overlap.timeout(0.5),
                counted() as found,
                pytest.raises(dist.DistBackendError, match=r"all_reduce.*rank 1"),
            ):
                symm_overlap.all_reduce(A, "sum", me.group)
            assert found == [], "the call should have begun, and have failed"
            with pytest.raises(RuntimeError, match="out of step"):
                symm_overlap.all_reduce(A, "sum", me.group)
        with pytest.raises(ValueError, match="reduce_op is 'max'"):
            symm_overlap.all_reduce(A, "max", me.group)


def test_a_repeated_call_that_fails_breaks_its_lane(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, fails_in_a_repeated_call, fresh_lane())


def rounds_after_the_exchange(me: Rank, lane: int) -> None:
    """Products that are rounded after the exchange, from gathered columns that are zeroed before it."""
    with comparing(False), in_place(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=1):
        for number in range(6):
            A, B = (small_integers(shape, number).bfloat16() for shape in ((4, 3), (3 * me.world, 5)))
            with counted() as calls, poisoned_outputs():
                gathered, (product,) = symm_overlap.all_gather_matmul(A, [B], 1, me.group)
            assert gathered is not None
            assert torch.equal(product, gathered @ B)
            assert calls == []


def test_calls_that_compute_after_the_exchange_are_not_repeated(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, rounds_after_the_exchange, fresh_lane())


def mapped() -> dict[int, str]:
    """Return where memory that processes share is mapped here: by the first address, what is mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {int(line[0].split("-")[0], 16): " ".join(line[4:]) for line in lines if "s" in line[1]}


def old_memory_is_freed(me: Rank, lane: int) -> None:
    """What is kept for repeated calls must not keep the memory of a workspace that has grown."""
    with comparing(False), in_place(False), symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=1):
        for number in range(4):
            assert gathers(me, torch.ones(8, 6)) == [True] or number < 3
        workspace = state_of(me.group).lane(me.group, torch.device("cpu"), lane).workspace
        address = workspace.view(me.rank, 0, 0, (1,), torch.uint8).data_ptr()
        maps = mapped()
        old = maps[max(begin for begin in maps if begin <= address)]
        symm_overlap.all_gather(torch.ones(1 << 19, 6), 0, me.group)
        gc.collect()
        assert old not in mapped().values()


def test_repeated_calls_do_not_keep_the_memory_of_an_old_workspace(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, old_memory_is_freed, fresh_lane())


def kinds_are_few(me: Rank, lane: int) -> None:
    with (
        comparing(False),
        in_place(False),
        symm_overlap.lane(lane),
        mock.patch.object(repeated, "MOST_REPEATED", 4),
    ):
        for turn in range(3):
            for rows in range(1, 11):
                for number in range(4):
                    assert gathers(me, torch.ones(rows, 2)) == [True] or number < 3
                assert len(state_of(me.group).repeated) <= 4
            for rows in range(7, 11):  # those that came last are still known
                assert gathers(me, torch.ones(rows, 2)) == [True], turn


def test_no_more_kinds_of_calls_are_kept_than_allowed(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, kinds_are_few, fresh_lane())
