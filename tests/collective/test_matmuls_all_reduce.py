"""The op that all-reduces a sum of products: wrong arguments, and tensors in unusual layouts. Its values and gradients
on every path are among the cases of `tests.collective.gradient_cases`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.collective.test_fake_group import fake_group
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], [], t(4, 5), "sum"), ValueError, "As is empty.* call all_reduce"),
        (([t(4, 3)], [], None, "sum"), ValueError, "As has 1 tensors and Bs has 0"),
        (([t(4, 3), t(4, 3)], [t(3, 2), t(3, 4)], None, "sum"), ValueError, r"one shape: got \[\[4, 2\], \[4, 4\]\]"),
        (([t(4, 3)], [t(3, 2)], t(4, 3), "sum"), ValueError, "one shape"),
        (([t(4, 3)], [t(3, 2)], t(4, 2, dtype=torch.float64), "sum"), TypeError, "addend is torch.float64"),
        (([t(4, 3)], [t(3, 2)], None, "max"), ValueError, "reduce_op is 'max'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with fake_group(2) as group, pytest.raises(error, match=message):
        ops.fused_matmuls_all_reduce(*arguments, group)


def unusual_layouts(me: Rank) -> None:
    def made(*shape: int, seed: int) -> torch.Tensor:
        return ref.binary(shape, torch.float32, 10 * me.rank + seed)

    for rows in (0, 1, 3, 8):
        As = [made(2, 6, rows, seed=1).mT, made(rows, 2, 5, seed=2).transpose(0, 1)]
        Bs = [made(7, 6, seed=3).t(), made(5, 14, seed=4)[:, ::2]]
        for addend in (None, made(2, 7, rows, seed=5).mT, made(1, 1, 7, seed=6).expand(2, rows, 7)):
            total = As[0] @ Bs[0] + As[1] @ Bs[1] + (0 if addend is None else addend)
            found = ops.fused_matmuls_all_reduce(As, Bs, addend, "sum", me.group_name)
            assert found.is_contiguous()
            assert torch.equal(found, symm_overlap.all_reduce(total, "sum", me.group))


@pytest.mark.parametrize("path", [None, "sequential", "pipelined", "c10d"])
def test_tensors_may_have_any_strides(ranks: Pool, path: str | None) -> None:
    ranks.run(3, on_path, path)


def on_path(me: Rank, path: str | None) -> None:
    with symm_overlap.force_path(path):
        unusual_layouts(me)
