"""Programs to time one tiny call of an op, and smaller programs whose times split its cost into parts.

Every program uses public or stable entry points, and a part is the difference between the times of two programs. The
split therefore stays the same when the internals of the package change. All programs are timed on the same two ranks
and in the same rounds:

==============  ========================================================================================================
call            the public function, such as ``symm_overlap.all_gather_matmul``
op              the torch op behind it, such as ``torch.ops.symm_overlap.fused_all_gather_matmul``, which always goes
                through torch's dispatcher and the autograd layer; the public function does so only if it must
alone           the public function in a group of one rank, without any communication
matmul          ``torch.mm`` of the same shapes into a preallocated output
empty_plan      a cached plan of the op, issued with functions that do nothing
meeting_plan    the same plan with real signals and waits
functional      torch.distributed's functional collective with ``torch.mm``
==============  ========================================================================================================
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor

import symm_overlap
from bench.harness.launch import Rank
from bench.harness.symmetric import symmetric_empty
from bench.plan_issue import PLANNERS, STREAMS
from symm_overlap.plan import Step, execute

BLOCK = 10  # calls that are timed together
ROWS, INNER, COLUMNS = 16, 32, 32  # a rank's tensors: (ROWS, INNER) times (INNER, COLUMNS)

ENTRIES = {
    "all_gather_matmul": "fused_all_gather_matmul",
    "matmul_reduce_scatter": "fused_matmul_reduce_scatter",
    "matmul_all_reduce": "fused_matmul_all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
}
"""The ops that are timed: the name of the public function, and the name of the torch op behind it."""

_PLANNED_AS = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
}
"""Ops without a matmul run the plan of the corresponding op with a matmul."""

Program = Callable[[], object]


def programs(rank: Rank, op: str, alone: dist.ProcessGroup) -> dict[str, Program]:
    """Prepare the programs of the module's table for ``op``, by name. Every rank must call this.

    Args:
        alone: a group that contains only this rank.
    """
    generator = torch.Generator().manual_seed(rank.rank)
    a, b = torch.randn(ROWS, INNER, generator=generator), torch.randn(INNER, COLUMNS, generator=generator)
    arguments = _arguments(op, a, b)
    function = getattr(symm_overlap, op)
    found: dict[str, Program] = {
        "call": partial(function, *arguments, rank.group),
        "op": partial(getattr(torch.ops.symm_overlap, ENTRIES[op]), *arguments, rank.group_name),
        "alone": partial(function, *arguments, alone),
        "functional": _functional(op, rank.group, a, b),
        **_plans(rank, op),
    }
    if "matmul" in op:  # with as many rows as the op multiplies in a group of one rank
        found["matmul"] = partial(torch.mm, a, b, out=a.new_empty(ROWS, COLUMNS))
    return found


def time_blocks(rank: Rank, timed: Mapping[str, Program], calls: int) -> dict[str, list[float]]:
    """Return the mean time of one call in microseconds, for each block of `BLOCK` calls back to back of each program.

    The programs take turns, so that a slow phase of the machine affects all of them, and the ranks start each block
    together. Timing single calls would give figures that are too low, because the rank that arrives last finds its
    peers ready.
    """
    means: dict[str, list[float]] = {name: [] for name in timed}
    for program in timed.values():
        for _ in range(BLOCK):
            program()
    gc.collect()
    gc.disable()
    try:
        for _ in range(max(1, calls // BLOCK)):
            for name, program in timed.items():
                program()  # refills the processor's caches, which contain the data of the previous program
                rank.start.wait()
                begin = time.perf_counter_ns()
                for _ in range(BLOCK):
                    program()
                means[name].append((time.perf_counter_ns() - begin) / BLOCK / 1e3)
    finally:
        gc.enable()
    return means


def split(times: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of one call in microseconds. Their sum is the time of ``call``.

    A part is a difference of medians, so a part that costs almost nothing may be slightly negative.
    """
    matmul = times.get("matmul", 0.0)
    parts = {
        "entry": times["alone"] - matmul,
        "matmul": matmul,
        "issue": times["empty_plan"],
        "waits": times["meeting_plan"] - times["empty_plan"],
    }
    return {**parts, "rest": times["call"] - sum(parts.values())}


def _arguments(op: str, a: Tensor, b: Tensor) -> tuple[Any, ...]:
    """Return the arguments that the public function and the torch op share, without the group, which comes last."""
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather_matmul": (a, [b], 0),
        "matmul_reduce_scatter": (a, b, "sum", 0),
        "matmul_all_reduce": (a, b, "sum"),
        "all_gather": (a, 0),
        "reduce_scatter": (a, "sum", 0),
        "all_reduce": (a, "sum"),
    }
    return arguments[op]


def _functional(op: str, group: dist.ProcessGroup, a: Tensor, b: Tensor) -> Program:
    """Return the equivalent without this package: a functional collective, the wait for it, and a matmul."""
    gather = _renamed("all_gather_single", "all_gather_tensor")
    scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    reduce: Callable[..., Tensor] = functional_collectives.all_reduce
    wait: Callable[..., Tensor] = functional_collectives.wait_tensor
    equivalents: dict[str, Program] = {
        "all_gather_matmul": lambda: torch.mm(gather(a, 0, group), b),
        "matmul_reduce_scatter": lambda: wait(scatter(torch.mm(a, b), "sum", 0, group)),
        "matmul_all_reduce": lambda: wait(reduce(torch.mm(a, b), "sum", group)),
        "all_gather": lambda: wait(gather(a, 0, group)),
        "reduce_scatter": lambda: wait(scatter(a, "sum", 0, group)),
        "all_reduce": lambda: wait(reduce(a, "sum", group)),
    }
    return equivalents[op]


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """Return a functional collective that torch 2.13 renamed. That version warns if the old name is used."""
    found: Callable[..., Any] = getattr(functional_collectives, new, None) or getattr(functional_collectives, old)
    return found


def _plans(rank: Rank, op: str) -> dict[str, Program]:
    """Return programs that run the op's plan for one chunk on the calling thread, without work.

    One runs all steps empty, the other one with real signals and waits. Both include the lookup of the plan in the
    planner's cache, as a call does.
    """
    planner = PLANNERS[_PLANNED_AS.get(op, op)]
    make, options = STREAMS["caller"]
    plan = partial(planner, rank.rank, rank.world, chunks=1, **options)
    memory = symmetric_empty(rank, 1, dtype=torch.float32)
    streams = make()
    empty: dict[str, Callable[[Step], object]] = {step.kind: _nothing for step in plan().steps}

    def signal(step: Step) -> None:
        for peer in step.peers:
            memory.handle.put_signal(dst_rank=peer, channel=step.channel)

    def wait(step: Step) -> None:
        for peer in step.peers:
            memory.handle.wait_signal(src_rank=peer, channel=step.channel)

    meeting = {**empty, "signal": signal, "wait": wait}
    return {
        "empty_plan": lambda: execute(plan(), empty, streams),
        "meeting_plan": lambda: execute(plan(), meeting, streams),
    }


def _nothing(step: Step) -> None:
    return None
