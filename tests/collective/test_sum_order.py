"""If a program allows sums in any order, a sum is one call of torch.distributed's collective into the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from symm_overlap.collective.exchange import c10d
from tests.collective import reference as ref
from tests.ranks import Pool, Rank
from tests.transforms import comparing


@contextmanager
def collectives() -> Iterator[list[tuple[Any, ...]]]:
    """Yield a list to which calls of torch.distributed's collectives are added: the name and the tensors' addresses."""
    seen: list[tuple[Any, ...]] = []

    def watched(place: Any, name: str) -> Any:
        original = getattr(place, name)

        def call(*tensors: Tensor, **more: Any) -> Any:
            seen.append((name, *(tensor.data_ptr() for tensor in tensors)))
            return original(*tensors, **more)

        return mock.patch.object(place, name, call)

    names = (
        (c10d, "all_gather_single"),
        (c10d, "reduce_scatter_single"),
        (dist, "all_reduce"),
        (dist, "all_to_all_single"),
    )
    with watched(*names[0]), watched(*names[1]), watched(*names[2]), watched(*names[3]):
        yield seen


def in_any_order(me: Rank, dtype: torch.dtype) -> None:
    world, name = me.world, me.group
    Xs = [ref.binary((2 * world, 3), dtype, seed=rank) for rank in range(world)]
    A, B = (
        [ref.binary((2 * world, 4), dtype, seed=10 + rank) for rank in range(world)],
        ref.binary((4, 3), dtype, seed=9),
    )
    X, total = Xs[me.rank], torch.stack(Xs).double().sum(0)
    product = sum((each.double() @ B.double() for each in A), torch.zeros(2 * world, 3, dtype=torch.float64))
    mine = slice(2 * me.rank, 2 * me.rank + 2)
    calls: dict[str, tuple[Callable[[], Tensor], str, Tensor]] = {
        "reduce_scatter": (
            lambda: symm_overlap.reduce_scatter(X, "sum", 0, name),
            "reduce_scatter_single",
            total[mine],
        ),
        "mean": (lambda: symm_overlap.reduce_scatter(X, "avg", 0, name), "reduce_scatter_single", total[mine] / world),
        "columns": (
            lambda: symm_overlap.reduce_scatter(X.t(), "sum", 1, name),
            "reduce_scatter_single",
            total[mine].t(),
        ),
        "matmul": (
            lambda: symm_overlap.matmul_reduce_scatter(A[me.rank], B, "sum", 0, name),
            "reduce_scatter_single",
            product[mine],
        ),
        "all_reduce": (lambda: symm_overlap.all_reduce(X, "sum", name), "all_reduce", total),
        "matmul_all_reduce": (
            lambda: symm_overlap.matmul_all_reduce(A[me.rank], B, "avg", name),
            "all_reduce",
            product / world,
        ),
    }
    with symm_overlap.force_path("c10d"), symm_overlap.sum_order("any"):
        for what, (call, collective, expected) in calls.items():
            with collectives() as seen:
                found = call()
            ((made, into, *others),) = seen
            assert (made, into) == (collective, found.data_ptr()), what
            if what == "reduce_scatter":
                assert others == [X.data_ptr()], "a contiguous input must not be copied first"
            torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)
        with collectives() as seen, symm_overlap.sum_order("rank"):
            assert torch.equal(symm_overlap.reduce_scatter(X, "sum", 0, name), total[mine].to(dtype))
        assert [collective for collective, *_ in seen] == ["all_to_all_single"]
        assert seen[0][2] == X.data_ptr()


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_a_whole_sum_in_any_order_is_one_collective_into_the_output(
    ranks: Pool, world: int, dtype: torch.dtype
) -> None:
    ranks.run(world, in_any_order, dtype)


def different_orders(me: Rank) -> str:
    with comparing(True), symm_overlap.sum_order("any" if me.rank else "rank"), pytest.raises(RuntimeError) as caught:
        symm_overlap.all_reduce(torch.ones(4), "sum", dist.new_group())
    return str(caught.value)


def test_ranks_that_want_different_orders_are_told(fresh_ranks: Callable[..., Pool]) -> None:
    for message in fresh_ranks(2).run(2, different_orders):
        assert "with forced order any" in message


def test_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed are 'rank' and 'any'"), symm_overlap.sum_order("random"):
        pass
