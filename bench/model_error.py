"""How far the cost model is from times that were measured.

    python -m bench.model_error
    python -m bench.model_error bench/measured/h200_llama.json

Without a file, predictions are compared with times that others have published (`bench.published_times`). A file is a
result of ``bench.collective_matmul --device cuda --json``, or an extract of one, such as those in ``bench/measured``.
For each case, a line shows the measured time of each method in milliseconds, and the predicted time as a multiple of
it. Its end says which path the model chooses, and how long that path takes, as a multiple of the quickest of
``sequential``, ``pipelined`` and ``fused``.

The benchmark enqueues a call while the GPU is still busy, so no time of the host is predicted. If the ranks were
emulated, a copy is predicted to take the time of the emulated link: the straight line that fits the rows "copies alone"
best. The choice is that for the device as it is known, with its own link and host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness.case import Case
from bench.harness.report import Row, grouped, median, quickest
from bench.methods.emulated import copied_bytes
from bench.predict import TORCHS, table_line
from bench.published_times import published_lines, range_lines, source_lines
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.plans import planned
from symm_overlap.collective.choosing.prediction import predict, predict_plain, predict_plan
from symm_overlap.collective.problem import Problem, problem
from symm_overlap.runtime import TRAITS, Device, DeviceCosts, costs_of
from symm_overlap.settings import Settings

_COLUMNS = {
    "matmul alone": ("matmul",),
    "plain": ("plain", "plain_allocating"),
    "torch's plan": ("published",),
    "kernels wait": ("ours_kernel_waits",),
    "memory operations": ("ours_memory_waits",),
    "a matmul a part": ("ours_parts",),
    "span 4": ("ours_span",),
    "fused": ("ours_fused",),
}
"""The methods of each column; the quickest of them counts."""

_OF_PATH = {
    "sequential": ("plain", "plain_allocating", "sequential"),
    "pipelined": ("ours_memory_waits",),
    "fused": ("ours_fused",),
}
"""The methods that measure each path of the chooser."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison. Return 0, or 2 for bad arguments."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.model_error", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what bench.collective_matmul --json wrote")
    options = parser.parse_args(arguments)
    if not options.files:
        print("\n".join([*published_lines(), "", *range_lines(), "", *source_lines()]))
    for number, file in enumerate(options.files):
        try:
            lines = measured_lines(json.loads(file.read_text()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            parser.error(f"{file} is not a result of bench.collective_matmul on a GPU: {error!r}")
        print("\n".join([""] * (number > 0) + [f"{file}", *lines]))
    return 0


class Compared(NamedTuple):
    """One case: the measured times of its methods, and what the model makes of it.

    Attributes:
        measured: the times in milliseconds, by column.
        ratios: the predicted times as multiples of the measured ones.
        chosen: the path that the chooser takes.
        loss: the time of that path as a multiple of the quickest one's; None if it was not measured.
    """

    op: str
    sizes: tuple[int, int, int]
    measured: dict[str, float]
    ratios: dict[str, float]
    chosen: str
    loss: float | None


def measured_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines that compare the times in a result of `bench.collective_matmul` with the model's predictions."""
    device, link = _device(result), _link(result)
    lines = [f"{device}, predicted with the costs of the {costs_of(TRAITS['cuda'].costs, Device(device)).name}"]
    if link:
        lines.append(f"a copy takes {link['copy_start'] * 1e6:.1f} us, and its bytes at {link['copy'] / 1e9:.0f} GB/s")
    found = compared(result)
    columns = [column for column in _COLUMNS if any(column in each.measured for each in found)]
    lines.append(
        f"{'op':22} {'M, N, K':18} " + " ".join(f"{column:>14}" for column in columns) + "  chosen, x quickest"
    )
    widths = (22, 18, *[7, 6] * len(columns), 11, 6)
    for each in found:
        cells = [
            word
            for column in columns
            for word in (
                (f"{each.measured[column]:.3f}", f"{each.ratios[column]:.2f}") if column in each.ratios else ("-", "")
            )
        ]
        loss = "-" if each.loss is None else f"{each.loss:.2f}"
        lines.append(table_line(widths, (each.op, ", ".join(map(str, each.sizes)), *cells, each.chosen, loss)))
    ratios = [[each.ratios[column] for each in found if column in each.ratios] for column in columns]
    losses = [each.loss for each in found if each.loss is not None]
    for what, of in (("geometric mean", statistics.geometric_mean), ("least", min), ("most", max)):
        words = [word for each in ratios for word in ("", f"{of(each):.2f}")]
        lines.append(table_line(widths, (what, "", *words, "", f"{of(losses):.2f}" if losses else "")))
    return lines


def compared(result: Mapping[str, Any]) -> list[Compared]:
    """Compare each case of a result with the model's predictions."""
    name, link = _device(result), _link(result)
    known = TRAITS["cuda"].costs
    costs = {
        waits: replace(costs_of(known, Device(name, waits)), host=0.0, host_matmul=0.0, **link)
        for waits in (True, False)
    }
    found = []
    for case in _cases(result):
        row = next(iter(case.values()))
        sizes = row["m"], row["n"], row["k"]
        described = problem(row["op"], *sizes, getattr(torch, row["dtype"]), row["world"], "cuda")
        measured, ratios = {}, {}
        for column, methods in _COLUMNS.items():
            method = _quickest_method(case, methods)
            predicted = None if method is None else _predicted(described, costs, case[method], column)
            if method is not None and predicted is not None:
                measured[column] = case[method]["median_ms"]
                ratios[column] = predicted / measured[column]
        found.append(Compared(row["op"], sizes, measured, ratios, *_loss(described, Device(name), case)))
    return found


def _device(result: Mapping[str, Any]) -> str:
    """Return the maker's name for the GPU."""
    return str(result["environment"]["gpus"][0].partition(",")[0])


def _cases(result: Mapping[str, Any]) -> list[dict[str, Row]]:
    return list(grouped(result["rows"]).values())


def _link(result: Mapping[str, Any]) -> dict[str, float]:
    """Return what replaces the costs of copies if the ranks were emulated."""
    return _fitted_link(_cases(result)) if "link" in result else {}


def _fitted_link(cases: Sequence[Mapping[str, Row]]) -> dict[str, float]:
    """Return the costs of a copy across the emulated link, from the rows "copies alone"."""
    sizes, seconds = [], []
    for case in cases:
        if (time := median(case, "copies")) is not None:
            row = case["copies"]
            one = Case(row["op"], row["m"], row["n"], row["k"], getattr(torch, row["dtype"]), row["world"])
            copies = (one.world - 1) * (2 if one.op == "matmul_all_reduce" else 1)
            sizes.append(copied_bytes(one) / copies)
            seconds.append(time / 1e3 / copies)
    if len(set(sizes)) < 2:
        raise ValueError("it needs rows 'copies alone' of at least two sizes")
    each, start = statistics.linear_regression(sizes, seconds)
    if not each > 0:
        raise ValueError("in the rows 'copies alone', larger copies do not take longer")
    return {"copy_start": max(0.0, start), "copy": 1 / each}


def _quickest_method(case: Mapping[str, Row], methods: Sequence[str]) -> str | None:
    measured = [name for name in methods if median(case, name) is not None]
    return min(measured, key=lambda name: case[name]["median_ms"], default=None)


def _predicted(described: Problem, costs: Mapping[bool, DeviceCosts], row: Row, column: str) -> float | None:
    """Return the predicted milliseconds of a row, with the chunks and copy streams that the row names."""
    mine = costs[column != "kernels wait"]
    if column == "matmul alone":
        return sum(mine.matmul(described.m, described.n, described.k, described.factors)) * 1e3
    if column == "plain":
        return predict_plain(described, mine).total
    if column == "torch's plan":
        published = TORCHS.get(described.op)
        return published and predict_plan(described, mine, published(0, described.world), Candidate("torch")).total
    path = "fused" if column == "fused" else "pipelined"
    if row.get("path", path) != path:
        return None
    device = Device(mine.name, column != "kernels wait")
    forced = Settings(path=path, chunks=row.get("chunks"), span=row.get("span"))
    choice = choose(described, forced, direct=True, device=device)
    choice = replace(choice, copies=row.get("copy_streams", choice.copies))
    if not row.get("emulated"):
        return predict(described, mine, choice).total
    return predict_plan(described, mine, planned(described, choice), choice.candidate).total  # only rank 0 is real


def _loss(described: Problem, device: Device, case: Mapping[str, Row]) -> tuple[str, float | None]:
    """Return the path that the chooser takes, and its time as a multiple of the quickest path's, if it was measured."""
    # Files from before matmuls could span several parts have no such rows.
    span = None if any("span" in row for row in case.values()) else 1
    chosen = choose(described, Settings(span=span), direct=True, device=device).path
    times = {path: quickest(case, methods) for path, methods in _OF_PATH.items()}
    known, mine = [each for each in times.values() if each is not None], times[chosen]
    return chosen, None if mine is None else mine / min(known)


if __name__ == "__main__":
    sys.exit(main())
