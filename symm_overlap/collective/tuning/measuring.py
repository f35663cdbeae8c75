"""Measuring the candidates for a kind of calls, on this rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...runtime import backend_of
from ...settings import force_path
from ..arguments import DTYPES, Group
from ..chooser import CHUNKS
from ..ops.all_gather import all_gather
from ..ops.all_gather_matmul import all_gather_matmul
from ..ops.all_reduce import all_reduce
from ..ops.matmul_all_reduce import matmul_all_reduce
from ..ops.matmul_reduce_scatter import matmul_reduce_scatter
from ..ops.reduce_scatter import reduce_scatter
from ..problem import OPS, Problem, problem
from ..tuned import Candidate

Shape = tuple[str, int, int, int]
"""An op and its m, n, k, as `symm_overlap.explain` takes them."""

_WARM_UP = 2
_CALLS = 3  # of one sample: a clock that is read around a single small call says little


class Inputs(NamedTuple):
    """The tensors of one call: the left one, of this rank, and the weight."""

    A: torch.Tensor
    B: torch.Tensor


_CALL: dict[str, Callable[[Inputs, Group], object]] = {
    "all_gather_matmul": lambda x, group: all_gather_matmul(x.A, [x.B], 0, group, return_A=False),
    "matmul_reduce_scatter": lambda x, group: matmul_reduce_scatter(x.A, x.B, "sum", 0, group),
    "matmul_all_reduce": lambda x, group: matmul_all_reduce(x.A, x.B, "sum", group),
    "all_gather": lambda x, group: all_gather(x.A, 0, group),
    "reduce_scatter": lambda x, group: reduce_scatter(x.A, "sum", 0, group),
    "all_reduce": lambda x, group: all_reduce(x.A, "sum", group),
}


def described(shape: Shape, dtype: torch.dtype, world: int, kind: str) -> Problem:
    """The record of the calls that a shape stands for.

    Raises:
        ValueError, TypeError: it is none.
    """
    try:
        op, m, n, k = shape
    except (TypeError, ValueError):
        raise TypeError(f"autotune: {shape!r} is no shape: give (op, m, n, k)") from None
    if op not in _CALL:
        raise ValueError(f"autotune: op is {op!r}: allowed are {', '.join(_CALL)}")
    if dtype not in DTYPES:
        raise ValueError(f"autotune: dtype is {dtype}: allowed are {', '.join(map(str, DTYPES))}")
    multiplies = OPS[op].multiplies
    if not all(isinstance(size, int) for size in (m, n, k)) or min(m, n) < 1 or (k < 1 if multiplies else k != 0):
        raise ValueError(f"autotune: {shape}: m and n are ints from 1 on, and so is k; without a matmul, k is 0")
    if m % world and not OPS[op].replicates:
        raise ValueError(f"autotune: {shape}: {m} rows cannot be shared out among {world} ranks")
    return problem(op, m, n, k, dtype, world, kind)


def candidates(problem: Problem, direct: bool) -> list[Candidate]:
    """What can be taken for calls of this kind: the plain way first."""
    path, cuts = ("pipelined", CHUNKS) if direct else ("c10d", CHUNKS[:2])
    pieces = dict.fromkeys(min(cut, problem.rows) for cut in cuts)
    return [("sequential", 1), *((path, cut) for cut in pieces)]


def measure(
    problem: Problem, found: Sequence[Candidate], group: Group, device: torch.device, rounds: int
) -> list[float]:
    """Milliseconds that a call takes on this rank, by candidate: the median over rounds, which take turns.

    Collective: every rank measures the same candidates.
    """
    backend, call, inputs = backend_of(device.type), _CALL[problem.op], _inputs(problem, device)
    samples: list[list[float]] = [[] for _ in found]
    for turn in range(rounds + 1):
        for number, (path, chunks) in enumerate(found):
            with force_path(path, chunks=None if path == "sequential" else chunks), torch.no_grad():
                calls = _CALLS if turn else _WARM_UP
                backend.synchronize(device)
                begin = time.perf_counter()
                for _ in range(calls):
                    call(inputs, group)
                backend.synchronize(device)
                if turn:
                    samples[number].append((time.perf_counter() - begin) * 1e3 / calls)
    return [statistics.median(each) for each in samples]


def _inputs(problem: Problem, device: torch.device) -> Inputs:
    m, n, k = problem.m, problem.n, problem.k
    rows = m // problem.world if problem.sort.gathers else m
    columns = k if problem.sort.multiplies else n
    return Inputs(*(torch.randn(size, device=device).to(problem.dtype) for size in ((rows, columns), (k, n))))
