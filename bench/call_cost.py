"""Cost of one tiny call of each op on two CPU ranks, split into parts, compared with functional collective + matmul.

    python -m bench.call_cost --json result.json

Every rank calls each op on float32 tensors of (16, 32). Ops with a matmul use a weight of (32, 32). Tensors this small
take almost no time to compute, so the figures show the cost of the software. Targets: 60 microseconds a call, and a
tenth of the time of torch.distributed's functional collective with a matmul. `bench.harness.call_parts` describes how
the parts are measured:

=========  =============================================================================================================
entry      checks of the arguments, choice of the path, outputs; measured in a group of one rank
matmul     the matmul alone
issue      issuing the steps of the plan, without their work
waits      signals to the peer and waits for it
rest       the remaining time: workspace, copies and sums, the larger matmul of gathered rows, and ranks out of step
=========  =============================================================================================================

The column ``by torch.ops`` shows the same call through torch's dispatcher and autograd layer. The public function uses
the dispatcher only if a gradient, autocast, a mode or a profiler needs it.

The verdicts use the median over blocks of calls on the slowest rank. The quickest block is shown beside it. If it is
far below the median, something else was running on these cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from bench.harness.call_parts import BLOCK, ENTRIES, programs, split, time_blocks
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, launch
from bench.harness.report import environment_lines

WORLD = 2
TARGET_US = 60.0
TARGET_RATIO = 0.1  # time of a call / time of functional collective + matmul
PARTS = ("entry", "matmul", "issue", "waits", "rest")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every op meets both targets, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.call_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="timed calls of each op (default 2000)")
    parser.add_argument("--ops", default=",".join(ENTRIES), help="ops to time, separated by commas (default: all)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    ops = list(dict.fromkeys(options.ops.split(",")))
    if unknown := [op for op in ops if op not in ENTRIES]:
        parser.error(f"--ops has {', '.join(unknown)}; give some of {', '.join(ENTRIES)}")
    if options.calls < BLOCK:
        parser.error(f"--calls is {options.calls}; give {BLOCK} or more, since calls are timed in blocks of that size")
    described = environment("cpu", WORLD, 1)
    print(environment_lines(described), flush=True)
    times = launch(_run, WORLD, "cpu", ops, options.calls)
    rows = [row(op, ranks) for op, ranks in zip(ops, zip(*times, strict=True), strict=True)]
    print(table(rows))
    write_json(options.json, described, rows=rows)
    return 0 if all(one["met"] for one in rows) else 1


def row(op: str, ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Compute the figures of one op from the times of its programs. The slowest rank counts for each program."""
    median = {name: max(statistics.median(rank[name]) for rank in ranks) for name in ranks[0]}
    quickest = {name: max(min(rank[name]) for rank in ranks) for name in ranks[0]}
    ratio = median["call"] / median["functional"]
    return {
        "op": op,
        "call_us": median["call"],
        "quickest_us": quickest["call"],
        "parts_us": split(median),
        "op_us": median["op"],
        "functional_us": median["functional"],
        "ratio": ratio,
        "target_us": TARGET_US,
        "target_ratio": TARGET_RATIO,
        "met": median["call"] <= TARGET_US and ratio <= TARGET_RATIO,
        "programs_us": median,
        "programs_quickest_us": quickest,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as a table in microseconds, with a verdict for each row and for all rows together."""
    titles = "".join(f"{part:>10}" for part in PARTS)
    lines = [
        f"\n  {'us a call':22}{'quickest':>9}{'median':>8} ={titles}{'by torch.ops':>14}{'functional':>12}{'ratio':>7}"
    ]
    for one in rows:
        parts = "".join(f"{one['parts_us'][part]:>10.1f}" for part in PARTS)
        figures = f"{one['quickest_us']:>9.1f}{one['call_us']:>8.1f} ={parts}"
        others = f"{one['op_us']:>14.1f}{one['functional_us']:>12.1f}{one['ratio']:>7.3f}"
        lines.append(f"  {one['op']:22}{figures}{others}  {'met' if one['met'] else 'MISSED'}")
    lines.append("")
    figures_and_targets = (
        (max(one["call_us"] for one in rows), "us a call", TARGET_US),
        (max(one["ratio"] for one in rows), "of functional collective + matmul", TARGET_RATIO),
    )
    for figure, what, target in figures_and_targets:
        lines.append(f"  {'met' if figure <= target else 'MISSED'}: at most {figure:.3g} {what}, target {target:g}")
    return "\n".join(lines)


def _run(rank: Rank, ops: Sequence[str], calls: int) -> list[dict[str, list[float]]]:
    groups = [dist.new_group([member]) for member in range(rank.world)]  # new_group is collective: call it for all
    return [time_blocks(rank, programs(rank, op, groups[rank.rank]), calls) for op in ops]


if __name__ == "__main__":
    sys.exit(main())
