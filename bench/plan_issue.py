"""Host cost per step of issuing a cached plan, without the cost of the functions it calls. Target: 1 microsecond.

    python -m bench.plan_issue --json result.json

The functions in the table do nothing, and the time to call them in a bare loop is subtracted. A call looks up its plan
in the planner's cache, as an op does. ``inline`` and ``caller`` issue all steps on the calling thread: ``inline``
through `InlineStreams`, and ``caller`` through `ThreadStreams`, as the ops do on CPU. ``threads`` passes each stream's
steps to a thread of its own, so that a call also includes the time to wake these threads. The verdict uses ``inline``
and ``caller``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.report import environment_lines
from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce, produce_reduce_scatter
from symm_overlap.plan import InlineStreams, Plan, Step, Streams, ThreadStreams, execute

TARGET_US = 1.0
PLANNERS: dict[str, Callable[..., Plan]] = {
    "all_gather_matmul": all_gather_consume,
    "matmul_reduce_scatter": produce_reduce_scatter,
    "matmul_all_reduce": produce_all_reduce,
}
# A plan with a single stream runs on the calling thread. "threads" has two compute streams and one for copies.
_ONE: dict[str, Any] = {"compute": ("compute0",), "copy": "compute0", "in_place": True}
STREAMS: dict[str, tuple[Callable[[], Streams], dict[str, Any]]] = {
    "inline": (InlineStreams, _ONE),
    "caller": (ThreadStreams, _ONE),
    "threads": (ThreadStreams, {"compute": ("compute0", "compute1"), "copy": "copy"}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every plan on the calling thread meets the target, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.plan_issue", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls of each plan (default 2000)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"--calls is {options.calls}; give 1 or more")
    described = environment("cpu", 1, 1)
    print(environment_lines(described))
    print(f"\n  {'op':24}{'streams':10}{'world':>6}{'chunks':>7}{'steps':>7}{'us a call':>11}{'us a step':>11}")
    rows = []
    for streams in STREAMS:
        for op in PLANNERS:
            for world, chunks in ((2, 1), (4, 2), (8, 2)):
                row = measure(op, streams, world, chunks, options.calls)
                rows.append(row)
                over = "" if row["us_per_step"] <= TARGET_US else f"  over {TARGET_US} us"
                print(
                    f"  {op:24}{streams:10}{world:>6}{chunks:>7}{row['steps']:>7}"
                    f"{row['us_per_call']:>11.2f}{row['us_per_step']:>11.3f}{over}"
                )
    worst = max(row["us_per_step"] for row in rows if row["streams"] != "threads")
    verdict = "met" if worst <= TARGET_US else "MISSED"
    print(f"\n  {verdict}: at most {worst:.3f} us a step on the calling thread, target {TARGET_US} us")
    write_json(options.json, described, target_us_per_step=TARGET_US, rows=rows)
    return 0 if worst <= TARGET_US else 1


def measure(op: str, streams: str, world: int, chunks: int, calls: int) -> dict[str, Any]:
    """Return the median cost of issuing rank 0's plan, in microseconds, minus the calls of the table's functions."""
    planner = PLANNERS[op]
    make, options = STREAMS[streams]
    runner = make()
    table = {step.kind: _nothing for step in planner(0, world, chunks=chunks, **options).steps}

    def issue() -> None:
        execute(planner(0, world, chunks=chunks, **options), table, runner)

    steps = planner(0, world, chunks=chunks, **options).steps
    pairs = [(table[step.kind], step) for step in steps]

    def bare() -> None:
        for function, step in pairs:
            function(step)

    cost = _median_us(issue, calls) - _median_us(bare, calls)
    return {
        "op": op,
        "streams": streams,
        "world": world,
        "chunks": chunks,
        "steps": len(steps),
        "us_per_call": cost,
        "us_per_step": cost / len(steps),
    }


def _nothing(step: Step) -> None:
    return None


def _median_us(call: Callable[[], None], calls: int) -> float:
    for _ in range(min(calls, 100)):
        call()
    spent = []
    gc.disable()
    try:
        for _ in range(calls):
            begin = time.perf_counter_ns()
            call()
            spent.append(time.perf_counter_ns() - begin)
    finally:
        gc.enable()
    return statistics.median(spent) / 1e3


if __name__ == "__main__":
    sys.exit(main())
