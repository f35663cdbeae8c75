"""Print the JSON of a benchmark as Markdown, for bench/RESULTS.md and docs/performance.md.

python -m bench.results result.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.emulation.link import link_line
from bench.harness.report import Row, baseline, fastest_matmul, grouped, median, quickest
from bench.harness.targets import Means, means

# One column for each method. If a column has several methods, it shows the quickest of them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "matmul alone": ("matmul",),
    "matmul of ours": ("matmul_of_ours",),
    "copies alone": ("copies",),
    "plain": ("plain", "plain_allocating"),
    "plain, matmul of ours": ("plain_of_ours", "plain_allocating_of_ours"),
    "copies, then matmul": ("sequential",),
    "torch's op": ("torch",),
    "torch's native": ("torch_native",),
    "torch's multimem": ("torch_multimem",),
    "torch's plan": ("published",),
    "ours": ("ours",),
    "kernels wait": ("ours_kernel_waits",),
    "memory operations wait": ("ours_memory_waits",),
    "a matmul a part": ("ours_parts",),
    "span 4": ("ours_span",),
    "fused": ("ours_fused",),
    "return_A=False": ("ours_no_gathered",),
    "no waits": ("ours_no_waits",),
    "no waits, copies": ("ours_no_waits_no_copies",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of one result file. Return 0, or 2 if ``bench.collective_matmul`` did not write the file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.results", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="file that bench.collective_matmul --json wrote")
    options = parser.parse_args(arguments)
    try:
        result = json.loads(options.file.read_text())
        text = markdown(result)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.file} is not a result of bench.collective_matmul: {error!r}")
    print(text)
    return 0


def markdown(result: dict[str, Any]) -> str:
    """Format the environment and the tables of speed, memory, targets and means."""
    parts = [", ".join(f"{name} {value}" for name, value in result["environment"].items()), speed_table(result["rows"])]
    if link := result.get("link"):
        parts.insert(1, f"*Emulated*: one rank, whose peers are memory; link {link_line(link)}.")
    if any("exposure_ms" in row for row in result["rows"]):
        parts.append(exposed_table(result["rows"]))
    if result["memory"]:
        parts.append(memory_table(result["memory"]))
    if result["targets"]:
        parts.append(target_table(result["targets"]))
    if averages := means(result["rows"]):
        parts.append(means_table(averages))
    return "\n\n".join(parts)


def speed_table(rows: Sequence[Row]) -> str:
    """Format the milliseconds of each method, and ours over plain and over the quickest matmul. Losses are in bold."""
    shown = {title: names for title, names in COLUMNS.items() if any(row["method"] in names for row in rows)}
    lines = [_line("op", "M, N, K", *shown, "ours / plain", "ours / matmul")]
    lines.append(_line("---", "---", *["---:"] * (len(shown) + 2)))
    for case in grouped(rows).values():
        row = next(iter(case.values()))
        times = [quickest(case, names) for names in shown.values()]
        ratios = [_ratio(median(case, "ours"), base) for base in (baseline(case), fastest_matmul(case))]
        over_plain = f"**{ratios[0]}**" if ratios[0] != "-" and float(ratios[0]) > 1 else ratios[0]
        shape = f"{row['m']}, {row['n']}, {row['k']}"
        cells = ["-" if time is None else f"{time:.3g}" for time in times]
        lines.append(_line(row["op"], shape, *cells, over_plain, ratios[1]))
    return "\n".join(lines)


def exposed_table(rows: Sequence[Row]) -> str:
    """Format where the milliseconds of each method went while a profiler recorded it; see `symm_overlap.profile`."""
    names = (
        "total",
        "compute",
        "exposed",
        "sums",
        "copies",
        "library",
        "waits",
        "other",
        "idle",
        "moving",
        "hidden",
        "pauses",
    )
    lines = [_line("op", "M, N, K", "method", *names), _line("---", "---", "---", *["---:"] * len(names))]
    for row in rows:
        if spent := row.get("exposure_ms"):
            shape = f"{row['m']}, {row['n']}, {row['k']}"
            lines.append(_line(row["op"], shape, row["method"], *(f"{spent[name]:.3f}" for name in names)))
    return "\n".join(lines)


def memory_table(memory: Sequence[Row]) -> str:
    """Format the growth during calls and the standing workspace, in MiB."""
    lines = [_line("M, N, K", "return_A", "gathered", "growth", "standing"), _line("---", "---", *["---:"] * 3)]
    for row in memory:
        sizes = [f"{row[name] / 2**20:.1f}" for name in ("gathered_bytes", "growth_bytes", "standing_bytes")]
        lines.append(_line(f"{row['m']}, {row['n']}, {row['k']}", str(row["return_A"]), *sizes))
    return "\n".join(lines)


def target_table(targets: Sequence[Row]) -> str:
    """Format each target with its limit, the figure reached and the verdict."""
    lines = [_line("target", "limit", "figure", "verdict", "where"), _line("---", "---:", "---:", "---", "---")]
    for one in targets:
        verdict = "met" if one["met"] else "**missed**"
        lines.append(_line(one["target"], f"{one['limit']:.2f}", f"{one['figure']:.3f}", verdict, one["where"]))
    return "\n".join(lines)


def means_table(averages: Sequence[Means]) -> str:
    """Format the geometric means over the cases of each group."""
    lines = [_line("geometric mean", "matmul / plain", "ours / plain", "ours / matmul"), _line("---", *["---:"] * 3)]
    for one in averages:
        ratios = (one.matmul_over_plain, one.ours_over_plain, one.ours_over_matmul)
        lines.append(_line(f"{one.group}, {one.base}", *(f"{ratio:.3f}" for ratio in ratios)))
    return "\n".join(lines)


def _ratio(time: float | None, base: float | None) -> str:
    return "-" if time is None or base is None else f"{time / base:.2f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
