"""Time of a training step on two CPU ranks: eager, compiled, with torch's own pass on our ops, and with our pass.

    python -m bench.compile --json result.json

The models use DTensor's tensor parallelism and nothing of this package (`bench.harness.dtensor_models`). A step is
forward and backward, without an optimizer. The four ways share weights and input and are checked against eager mode.
They take turns in shuffled rounds, and the ranks wait for each other before each step. The time of a round is that of
its slowest rank. Ways are compared round by round, so that a slow phase of the machine affects all of them. The times
of the quickest rounds are shown in brackets.

There are two goals. First, the median over rounds is quicker for ours than for each other way. Second, the pass takes
less than 3 % of the time of compilation, which is the time of the first step with no graph and no kernel in a cache.
The work that torch.compile does once on a machine (it tries out the C++ compiler) is done before. The second figure is
for the same step with all kernels on disk, so that no C++ is compiled. "Collectives left" counts the collectives that
remain in the graphs.

torch's pass uses the ops of this package, because its own have no CPU kernels. If both passes fuse the same
collectives, the two ways do the same work, and their ratio is close to 1, above or below.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.compiled import WAYS, cache_in, prepared
from bench.harness.dtensor_models import Size
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, launch
from bench.harness.report import environment_lines
from bench.harness.timing import Timed, time_methods

WORLD = 2
TARGET_RATIO = 1.0  # time of ours / time of each other way
TARGET_SHARE = 0.03  # time of the pass / time of compilation
SIZE = Size(seq=1024, width=512, hidden=2048, heads=8)
MODELS = (
    "MLP, dim 0",
    "MLP, dim 0, no bias",
    "MLP, all-reduce",
    "block, batch 1",
    "block, batch 2",
    "block, all-reduce",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if all goals are met, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each way (default: %(default)s)")
    parser.add_argument(
        "--models", default=";".join(MODELS), help="models, separated by semicolons (default: %(default)s)"
    )
    parser.add_argument("--size", default=",".join(map(str, vars(SIZE).values())), metavar="SEQ,WIDTH,HIDDEN,HEADS")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    models = options.models.split(";")
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"--models has {', '.join(unknown)}; give some of {'; '.join(MODELS)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give 1 or more")
    numbers = options.size.split(",")
    if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        parser.error(f"--size is {options.size}; give four numbers, such as {','.join(map(str, vars(SIZE).values()))}")
    size = Size(*map(int, numbers))
    described = environment("cpu", WORLD, 1)
    print(environment_lines(described))
    with tempfile.TemporaryDirectory(prefix="symm_overlap_bench_") as folder:
        ranks = launch(_run, WORLD, "cpu", models, size, options.rounds, folder)
    rows = [row(name, found) for name, found in zip(models, zip(*ranks, strict=True), strict=True)]
    print(table(rows))
    write_json(options.json, described, size=vars(size), rows=rows)
    return 0 if all(met for one in rows for met in one["met"].values()) else 1


def row(model: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the figures of one model. In each round and in each compilation, the slowest rank counts."""
    steps = {way: [max(times) for times in zip(*(rank["ms"][way] for rank in ranks), strict=True)] for way in WAYS}
    ratios = {
        way: statistics.median(ours / other for ours, other in zip(steps["ours"], steps[way], strict=True))
        for way in WAYS[:-1]
    }
    compilations = [
        max(both, key=lambda one: one["share"]) for both in zip(*(rank["compilations"] for rank in ranks), strict=True)
    ]
    return {
        "model": model,
        "median_ms": {way: statistics.median(times) for way, times in steps.items()},
        "quickest_ms": {way: min(times) for way, times in steps.items()},
        "ratios": ratios,
        "quickest_ratios": {way: min(steps["ours"]) / min(steps[way]) for way in WAYS[:-1]},
        "left": ranks[0]["left"],
        "compilations": compilations,
        "met": {
            **{way: ratio < TARGET_RATIO for way, ratio in ratios.items()},
            "share": compilations[0]["share"] < TARGET_SHARE,
        },
        "steps_ms": steps,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format step times, ratios and the pass's shares of compilation, each with its verdict."""
    lines = ["", _line("ms a step, median (quickest)", WAYS)]
    for one in rows:
        times = [(one["median_ms"][way], one["quickest_ms"][way]) for way in WAYS]
        lines.append(_line(one["model"], [f"{median:.1f} ({quickest:.1f})" for median, quickest in times]))
    lines += ["", _line("ours / other, median (quickest)", WAYS[:-1])]
    for one in rows:
        ratios = [(one["ratios"][way], one["quickest_ratios"][way], _word(one["met"][way])) for way in WAYS[:-1]]
        lines.append(_line(one["model"], [f"{median:.3f} ({quickest:.3f}) {met}" for median, quickest, met in ratios]))
    lines += ["", _line("collectives left", ["", *WAYS[1:]])]
    lines += [_line(one["model"], ["", *(str(one["left"][way]) for way in WAYS[1:])]) for one in rows]
    lines += ["", _line("s to compile, ms of the pass", ["nothing cached", "kernels on disk"])]
    for one in rows:
        cold, warm = (
            f"{each['seconds']:.1f}, {1e3 * each['in_pass']:.0f} = {each['share']:.2%}" for each in one["compilations"]
        )
        lines.append(_line(one["model"], [f"{cold} {_word(one['met']['share'])}", warm]))
    lines.append("")
    for way in WAYS[:-1]:
        met, worst = all(one["met"][way] for one in rows), max(one["ratios"][way] for one in rows)
        lines.append(f"  {_word(met)}: at most {worst:.3f} of {way}, goal below {TARGET_RATIO:g}")
    share = max(one["compilations"][0]["share"] for one in rows)
    met = all(one["met"]["share"] for one in rows)
    lines.append(f"  {_word(met)}: the pass takes at most {share:.2%} of compilation, goal below {TARGET_SHARE:.0%}")
    return "\n".join(lines)


def _line(title: str, cells: Sequence[str]) -> str:
    return f"  {title:32}{''.join(f'{cell:>24}' for cell in cells)}"


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def _run(rank: Rank, models: Sequence[str], size: Size, rounds: int, folder: str) -> list[dict[str, Any]]:
    with cache_in(folder):
        return [_measured(rank, name, size, rounds) for name in models]


def _measured(rank: Rank, name: str, size: Size, rounds: int) -> dict[str, Any]:
    if rank.rank == 0:
        print(f"  {name}: compiling it in every way, then {rounds} rounds", file=sys.stderr, flush=True)
    model = prepared(rank, name, size)
    timed = {way: Timed(step) for way, step in model.steps.items()}
    samples = time_methods(rank, timed, rounds, fill_ms=0)  # 0: one step of each way in a round
    compilations = [vars(one) | {"share": one.in_pass / one.seconds} for one in model.compilations]
    return {"ms": samples, "compilations": compilations, "left": model.collectives}


if __name__ == "__main__":
    sys.exit(main())
