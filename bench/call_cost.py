"""What one tiny call of each op costs on two CPU ranks, split into its parts, beside functional collective + matmul.

    python -m bench.call_cost --json result.json

Every rank calls each op on float32 tensors of (16, 32), times a weight of (32, 32) where the op multiplies, so that
what is timed is the path through the software. Targets: 60 microseconds a call, and a tenth of the functional
collective of torch.distributed with a matmul. `bench.harness.call_parts` says how the parts are measured:

=========  =============================================================================================================
entry      checks of the arguments, choice of the path, outputs; measured in a group of one rank
matmul     the bare matmul
issue      the steps of the plan, without their work
waits      signals to the peer and waits for it
rest       what is left: workspace, copies and sums, the larger matmul of gathered rows, and ranks out of step
=========  =============================================================================================================

Beside the parts, ``by torch.ops`` is the same call through torch's dispatcher and autograd layer. The public function
takes that way where there is something to do on it: a gradient, autocast, a mode, a profiler.

The verdicts are on the median over blocks of calls, of the slowest rank. The quickest block is shown beside it: where
it is far below the median, something else was running on these cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.harness.call_parts import BLOCK, ENTRIES, programs, split, time_blocks
from bench.harness.environment import environment
from bench.harness.launch import Rank, launch
from bench.harness.report import environment_lines

WORLD = 2
TARGET_US = 60.0
TARGET_RATIO = 0.1  # of functional collective + matmul
PARTS = ("entry", "matmul", "issue", "waits", "rest")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when every op meets both targets, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.call_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="timed calls of each op (default 2000)")
    parser.add_argument("--ops", default=",".join(ENTRIES), help="ops to time (default: all, separated by commas)")
    parser.add_argument("--json", metavar="FILE", help="write environment and rows")
    options = parser.parse_args(arguments)
    ops = list(dict.fromkeys(options.ops.split(",")))
    if unknown := [op for op in ops if op not in ENTRIES]:
        parser.error(f"--ops has {', '.join(unknown)}; give some of {', '.join(ENTRIES)}")
    if options.calls < BLOCK:
        parser.error(f"--calls is {options.calls}; give {BLOCK} or more, since so many are timed together")
    described = environment("cpu", WORLD, 1)
    print(environment_lines(described), flush=True)
    times = launch(_run, WORLD, "cpu", ops, options.calls)
    rows = [row(op, ranks) for op, ranks in zip(ops, zip(*times, strict=True), strict=True)]
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps({"environment": described, "rows": rows}, indent=1) + "\n")
    return 0 if all(one["met"] for one in rows) else 1


def row(op: str, ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """The figures of one op from the times of its programs on every rank; the slowest rank counts for each program."""
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
    """The rows as a table of microseconds, each with its verdict, and the verdict on all of them."""
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
    groups = [dist.new_group([member]) for member in range(rank.world)]  # every rank makes all of them
    return [time_blocks(rank, programs(rank, op, groups[rank.rank]), calls) for op in ops]


if __name__ == "__main__":
    sys.exit(main())
