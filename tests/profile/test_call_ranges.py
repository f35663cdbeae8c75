"""The name of a call's range says what was called, and how it was carried out."""

from __future__ import annotations

import itertools

import pytest
import torch

from symm_overlap.collective import called
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.exchange.ranges import name_of_range
from symm_overlap.collective.problem import OPS, Problem, problem
from symm_overlap.settings import Settings

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def problems() -> list[Problem]:
    found = []
    for op, dtype, world, device, last in itertools.product(OPS, DTYPES, (2, 8), ("cpu", "cuda"), (False, True)):
        k = 4096 if OPS[op].multiplies and not OPS[op].moves_weight else 0
        found.append(problem(op, 8192, 1024, k, dtype, world, device, last_dim=last, arguments=((3, 4), ("dim", 0))))
    return found


def test_problem_choice_and_rank_are_read_from_the_name() -> None:
    for given in problems():
        choice = choose(given, Settings(), direct=True)
        read = called(name_of_range(given, choice, 1))
        assert read is not None
        found, path = read
        for name in ("op", "m", "n", "k", "rows", "nbytes", "dtype", "world", "device", "last"):
            assert getattr(found, name) == getattr(given, name), (name, str(given))
        for name in ("path", "exchange", "chunks", "whole", "one_shot", "compute", "copy", "copies"):
            assert getattr(path, name) == getattr(choice, name), (name, str(given))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "aten::mm",
        "symm_overlap call: ",
        "symm_overlap call: all_gather; ",
        "symm_overlap call: all_gather; op=all_gather m=1 n=2",
        "symm_overlap call: of the future; op=of_the_future m=1 n=1 k=1 dtype=float32 world=2 rank=0 device=cpu last=0 "
        "path=pipelined exchange=planned chunks=1 whole=0 one_shot=0 compute=compute0 copy=copy copies=1",
        "symm_overlap call: all_gather; op=all_gather m=x n=1 k=1 dtype=float32 world=2 rank=0 device=cpu last=0",
        "symm_overlap call: all_gather; op=all_gather m=1 n=1 k=1 dtype=decimal world=2 rank=0 device=cpu last=0",
        "symm_overlap call: all_gather; op=all_gather m=1 n=1 k=1 dtype=float32 world=0 rank=0 device=cpu last=0",
    ],
)
def test_other_names_are_not_calls(name: str) -> None:
    assert called(name) is None
