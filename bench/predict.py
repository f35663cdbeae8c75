"""Times that the cost model predicts for the plain collective, torch's published plan, and ours. Nothing is run.

    python -m bench.predict
    python -m bench.predict --waits kernels

The model issues all plans in the same way and uses the same costs for their steps. Only the plans differ. The table
therefore shows nothing about how the plans are implemented, and nothing about effects that are not modelled. "Ours" is
the plan that the chooser picks. "Fused" is one persistent kernel that is assumed to reach 0.95 of the library's rate,
about what it reaches on an H200. `bench.model_error` compares predictions with measured times.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from bench.harness import shapes
from bench.harness.case import OPS
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.choice import Prediction
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.prediction import predict_plain, predict_plan
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.collective.problem import Problem, problem
from symm_overlap.plan import Plan
from symm_overlap.runtime import TRAITS, Device, costs_of
from symm_overlap.settings import Settings

TORCHS: dict[str, Callable[[int, int], Plan]] = {
    "all_gather_matmul": torch_all_gather_matmul,
    "matmul_reduce_scatter": torch_matmul_reduce_scatter,
}
DTYPE = torch.bfloat16


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Return 0, or 2 for bad arguments."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__.splitlines()[0])
    known = [costs.name for costs in TRAITS["cuda"].costs]
    parser.add_argument("--device", choices=known, default=known[0], help="default %(default)s")
    parser.add_argument("--world", type=int, default=8, help="number of ranks (default 8)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["llama", "gpt3"],
        metavar="SET|M,N,K",
        help=f"sets ({', '.join(shapes.SETS)}), or M,N,K where M counts the gathered rows (default llama gpt3)",
    )
    parser.add_argument(
        "--waits",
        choices=("kernels", "memory"),
        default="memory",
        help="whether streams wait by kernels or by memory operations (default memory)",
    )
    options = parser.parse_args(arguments)
    device = Device(options.device, options.waits == "memory")
    try:
        if options.world < 2:
            raise ValueError(f"--world is {options.world}: there must be at least 2 ranks")
        found = shapes.parse(options.shapes, options.world)
    except ValueError as error:
        parser.error(str(error))
    print(f"predicted, not measured: {options.world} {device}, bfloat16, times in ms")
    print("\n".join(table(device, options.world, found)))
    return 0


class Row(NamedTuple):
    """The predictions for one call: plain collective and matmul, torch's plan, ours, and the best fused kernel."""

    plain: Prediction
    torchs: Prediction
    ours: Prediction
    fused: Prediction

    @property
    def gains(self) -> tuple[float, float, float]:
        """Return three speed-ups: ours over plain, ours over torch's plan, and fused over plain."""
        plain = self.plain.total
        return plain / self.ours.total, self.torchs.total / self.ours.total, plain / self.fused.total


def table(device: Device, world: int, found: Iterable[shapes.Shape]) -> list[str]:
    """Return a line for each op of each shape, and one with the geometric means."""
    widths = (23, 4, 18, 7, 8, 7, 9, 8, 8, 7, 9, 8)
    header = "layer", "op", "M, N, K", "plain", "torch's", "ours", "", "x plain", "x torch", "fused", "", "x plain"
    lines = [table_line(widths, header)]
    gains: list[tuple[float, float, float]] = []
    for shape, short, row in rows_of(device, world, found):
        gains.append(row.gains)
        plain, torchs, ours, fused = (f"{each.total:.3f}" for each in row)
        gain, to_torch, of_fused = (f"{each:.2f}" for each in row.gains)
        size = f"{shape.m}, {shape.n}, {shape.k}"
        cells = plain, torchs, ours, _how(row.ours), gain, to_torch, fused, _how(row.fused), of_fused
        lines.append(table_line(widths, (shape.label, short, size, *cells)))
    if gains:
        gain, to_torch, of_fused = (
            f"{math.exp(sum(map(math.log, each)) / len(gains)):.2f}" for each in zip(*gains, strict=True)
        )
        lines.append(table_line(widths, ("geometric mean", *[""] * 6, gain, to_torch, "", "", of_fused)))
    return lines


def rows_of(device: Device, world: int, found: Iterable[shapes.Shape]) -> Iterator[tuple[shapes.Shape, str, Row]]:
    """Yield the predictions for each op of each shape, with the shape and the op's short name."""
    for shape in found:
        for short in (name for name in shape.ops if OPS[name] in TORCHS):
            yield shape, short, predictions(OPS[short], shape.m, shape.n, shape.k, device, world)


def predictions(op: str, m: int, n: int, k: int, device: Device, world: int) -> Row:
    """Return the predictions for one call."""
    described: Problem = problem(op, m, n, k, DTYPE, world, "cuda")
    choice = choose(described, Settings(), direct=True, device=device)
    costs = costs_of(TRAITS["cuda"].costs, device)
    torchs = predict_plan(described, costs, TORCHS[op](0, world), Candidate("torch"))
    ours = next(each for each in choice.predictions if each.candidate == choice.candidate)
    fused = min((each for each in choice.predictions if each.path == "fused"), key=lambda each: each.total)
    return Row(predict_plain(described, costs), torchs, ours, fused)


def _how(each: Prediction) -> str:
    if each.path == "sequential":
        return "whole"
    _, chunks, span = each.candidate
    return f"span {span}" if span > 1 else f"{chunks} chunk{'s' * (chunks > 1)}"


def table_line(widths: Sequence[int], cells: Sequence[str]) -> str:
    """Format one line. Wide columns contain words and are left-aligned. Narrow ones contain numbers."""
    words = (
        cell.ljust(width) if width in (4, 9) or width > 12 else cell.rjust(width)
        for width, cell in zip(widths, cells, strict=True)
    )
    return " ".join(words).rstrip()


if __name__ == "__main__":
    sys.exit(main())
