"""Host work for one call of an op on a GPU, counted without a GPU by a stand-in that only records the launches.

    python -m bench.gpu_host --json result.json

Every row is one call on rank 0 of a group without peers, through the public function. ``span`` is how many peers'
parts one matmul may cover. ``large`` counts matmuls and copies, and ``small`` counts all other launches. ``events``
counts the recording of events and the waits for them, which launch nothing. ``driver`` is how often the CUDA driver is
called for all of them, if signals, waits and flags are memory operations. The event that a lane records at the end of a
call is not counted. ``call`` is the time of the whole call, and ``issue`` the time of the plan's program alone. On a
real GPU, the driver's time for each launch is added to both. Calls repeat an earlier one of the same kind; ``usual`` is
the quickest tenth of calls that do not. The rows of the path "fused" need Triton, which compiles their kernels for a
GPU of architecture 90. The rows "fsdp" are the collectives that replace those of FSDP2. Targets of the ops for 8 ranks
and 1 chunk: at most 24 small launches, and 40 microseconds a call in the quickest tenth of the calls.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import symm_overlap
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.report import environment_lines
from bench.harness.stand_in import StandIn, standing_in
from bench.harness.targets import Verdict
from bench.harness.unrepeated import unrepeated
from symm_overlap.fsdp.communication.collectives import all_gather, reduce_scatter
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.kernels import has_kernels
from symm_overlap.runtime.script import Script
from symm_overlap.runtime.stand_in import StandInWorkspace
from symm_overlap.settings import Settings, applied, current

TARGET_US, TARGET_SMALL = 40.0, 24
BLOCKS = 20  # of calls of a row
FSDP = "fsdp"
PATHS = ("pipelined", *(("fused",) if has_kernels(90) else ()), FSDP)
ROWS, INNER, COLUMNS = 64, 32, 16  # so small that the memory of a call costs the host nearly nothing
_CALL_KINDS = {
    **dict.fromkeys(("multiply", "multiply scaled", "kernel", "copy", "copy tensor"), "large"),
    **dict.fromkeys(("record", "follow"), "events"),
    "make": "memory",
}
_MEMORY_OPERATIONS = "signal", "wait", "raise", "await"
OPS: dict[str, Callable[[StandIn, int], Callable[[], object]]] = {
    "all_gather_matmul": lambda me, world: _gather(me, torch.empty(ROWS, INNER), torch.empty(INNER, COLUMNS)),
    "matmul_reduce_scatter": lambda me, world: _reduce(
        symm_overlap.matmul_reduce_scatter, me, torch.empty(ROWS * world, INNER), torch.empty(INNER, COLUMNS), (0,)
    ),
    "matmul_all_reduce": lambda me, world: _reduce(
        symm_overlap.matmul_all_reduce, me, torch.empty(ROWS * world, INNER), torch.empty(INNER, COLUMNS), ()
    ),
}


COLLECTIVES: dict[str, Callable[[Slots], object]] = {
    "all_gather": lambda slots: _fsdp_gather(slots),
    "reduce_scatter": lambda slots: reduce_scatter(
        slots, torch.empty(ROWS), slots.allocate((ROWS * slots.world,), torch.float32), AVERAGE
    ),
}
AVERAGE = dist.ReduceOp(dist.ReduceOp.AVG)


def ops_of(path: str) -> list[tuple[str, int, int, int]]:
    """Return the rows of a path: op, number of ranks, number of chunks, and how many parts a matmul may cover."""
    ops, chunks = (COLLECTIVES, (1,)) if path == FSDP else (OPS, (1, 2))
    spans = [(op, 8, 1, 4) for op in ops] if path == "pipelined" else []
    return [*itertools.product(ops, (2, 8), chunks, (1,)), *spans]


def _fsdp_gather(slots: Slots) -> object:
    """Gather as FSDP2 does: the output is a slot, and this rank's part is in it."""
    output = slots.allocate((ROWS * slots.world,), torch.float32)
    return all_gather(slots, output, output.chunk(slots.world)[slots.rank])


def _gather(me: StandIn, A: torch.Tensor, B: torch.Tensor) -> Callable[[], object]:
    return lambda: symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)


def _reduce(
    op: Callable[..., object], me: StandIn, A: torch.Tensor, B: torch.Tensor, dim: tuple[int, ...]
) -> Callable[[], object]:
    return lambda: op(A, B, "sum", *dim, me.group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every op meets the targets at 8 ranks and 1 chunk, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_host", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls of each row (default 2000)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"--calls is {options.calls}; give 1 or more")
    described = environment("cpu", 1, 1)
    print(environment_lines(described))
    print(f"\n  {'path':11}{'op':24}{'world':>6}{'chunks':>7}{'span':>6}{'large':>7}{'small':>7}{'events':>8}", end="")
    print(f"{'driver':>8}{'call us':>9}{'(fast)':>8}{'(usual)':>9}{'issue us':>10}")
    rows = []
    for path in PATHS:
        for op, world, chunks, span in ops_of(path):
            row = measure(op, world, chunks, options.calls, path, span)
            rows.append(row)
            print(
                f"  {path:11}{op:24}{world:>6}{chunks:>7}{span:>6}{row['large']:>7}{row['small']:>7}{row['events']:>8}"
                f"{row['driver']:>8}{row['us_per_call']:>9.1f}{row['fast_us_per_call']:>8.1f}"
                f"{row['fast_us_per_usual_call']:>9.1f}{row['us_to_issue']:>10.1f}"
            )
    judged = verdicts(rows)
    print("", *judged, sep="\n")
    write_json(options.json, described, targets=[verdict.as_dict() for verdict in judged], rows=rows)
    return 0 if all(verdict.met for verdict in judged) else 1


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Judge the calls of 8 ranks with 1 chunk, on each path by the op that does worst."""
    found = []
    for path in [path for path in PATHS if path != FSDP]:
        judged = [row for row in rows if [row[key] for key in ("path", "world", "chunks", "span")] == [path, 8, 1, 1]]
        for key, target, what in (
            ("fast_us_per_call", TARGET_US, "us a call"),
            ("small", TARGET_SMALL, "small launches"),
        ):
            worst = max(judged, key=lambda row: row[key])
            found.append(Verdict(f"{path}, 8 ranks, 1 chunk: {what}", target, worst[key], worst["op"]))
    return found


def measure(op: str, world: int, chunks: int, calls: int, path: str, span: int = 1) -> dict[str, Any]:
    """Measure one row of the table."""
    with ExitStack() as stack:
        forced = {} if path == FSDP else {"path": path, "chunks": chunks, "span": span}
        me = stack.enter_context(standing_in(0, world, **forced))
        if path == FSDP:
            stack.enter_context(applied(Settings()))
        if path == "fused":
            from bench.harness.triton_gpu import SilentFlags, beside_a_kernel

            stack.enter_context(beside_a_kernel(SilentFlags))
        call, workspace = _prepared(me, op, path, world)
        call()
        launches = workspace().driver.take()
        made = Counter(_CALL_KINDS.get(what, "small") for what, *_ in launches)
        spent: list[float] = []
        usual: list[float] = []
        for _ in range(min(calls, BLOCKS)):  # in turns, since the speed of a machine may change
            spent += _spent_us(call, workspace, -(-calls // BLOCKS))
            with unrepeated():
                usual += _spent_us(call, workspace, -(-calls // BLOCKS))
        programs: list[Callable[[], None]] = []
        original = Script.run

        def noted(script: Script, name: str, tensors: Any, table: Any) -> None:
            programs.append(lambda: original(script, name, tensors, table))
            original(script, name, tensors, table)

        with mock.patch.object(Script, "run", noted):
            call()
        return {
            "path": path,
            "op": op,
            "world": world,
            "chunks": chunks,
            "span": span,
            **{kind: made[kind] for kind in ("large", "small", "events")},
            "driver": driver_calls(launches),
            "us_per_call": statistics.median(spent),
            "fast_us_per_call": sorted(spent)[len(spent) // 10],
            "fast_us_per_usual_call": sorted(usual)[len(usual) // 10],
            "us_to_issue": statistics.median(_spent_us(programs[0], workspace, calls)),
        }


def _prepared(
    me: StandIn, op: str, path: str, world: int
) -> tuple[Callable[[], object], Callable[[], StandInWorkspace]]:
    """Return the call, and a function that returns the workspace of its lane."""
    if path != FSDP:
        return OPS[op](me, world), lambda: me.workspace
    slots = Slots("slots", me.group, torch.device("cpu"), 2, current())
    slots.reserve(2, ROWS * world * torch.float32.itemsize)
    workspace = slots.lane.workspace
    assert isinstance(workspace, StandInWorkspace)
    return lambda: COLLECTIVES[op](slots), lambda: workspace


def driver_calls(launches: Sequence[tuple[str, int, tuple[int, ...]]]) -> int:
    """Return how often the CUDA driver is called for launches and events, if signals, waits and flags are memory
    operations. Those that follow one another on a stream are one call.
    """
    kinds = [(what in _MEMORY_OPERATIONS, stream) for what, stream, _ in launches if what not in ("make", "enter")]
    return sum(kind != before or not kind[0] for before, kind in zip([None, *kinds], kinds, strict=False))


def _spent_us(call: Callable[[], object], workspace: Callable[[], StandInWorkspace], calls: int) -> list[float]:
    spent = []
    gc.disable()
    try:
        for number in range(calls):
            begin = time.perf_counter_ns()
            call()
            spent.append((time.perf_counter_ns() - begin) / 1e3)
            if number % 64 == 0:  # reading the recorded launches clears them, so that the record stays short
                workspace().driver.take()
    finally:
        gc.enable()
    return spent


if __name__ == "__main__":
    sys.exit(main())
