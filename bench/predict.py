"""Times that the cost model predicts for the plain collective, torch's published plan, and ours. Nothing is run.

    python -m bench.predict
    python -m bench.predict --waits kernels
    python -m bench.predict --published

The model issues all plans in the same way and uses the same costs for their steps. Only the plans differ. The table
therefore shows nothing about how the plans are implemented, and nothing about effects that are not modelled, such as
copies and matmuls that slow each other down. "Ours" is the plan that the chooser picks. "Fused" is one persistent
kernel that is assumed to reach 0.95 of the library's rate, about what it reaches on an H200.
``--published`` predicts calls on 8 H100 whose times others have published. The ratios show the error of the model.
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
from symm_overlap.collective.choice import Prediction
from symm_overlap.collective.chooser import choose
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.collective.prediction import predict_plain, predict_plan
from symm_overlap.collective.problem import Problem, problem
from symm_overlap.plan import Plan
from symm_overlap.runtime import TRAITS, Device, costs_of
from symm_overlap.settings import Settings

TORCHS: dict[str, Callable[[int, int], Plan]] = {
    "all_gather_matmul": torch_all_gather_matmul,
    "matmul_reduce_scatter": torch_matmul_reduce_scatter,
}
DTYPE = torch.bfloat16


class Published(NamedTuple):
    """A call on 8 H100, and the time that its authors published for one way to do it, in milliseconds."""

    op: str
    m: int
    n: int
    k: int
    way: str
    time: float
    source: str  # a key of `SOURCES`; after a comma, which of that source's ways


SOURCES = {
    "torch": "https://github.com/pytorch/pytorch/pull/143160",
    "Triton recipes": "https://github.com/yifuwang/symm-mem-recipes",
    "kraken": "https://github.com/meta-pytorch/kraken/pull/19",
    "ParallelKittens": "https://arxiv.org/abs/2511.13940",
    "FlashOverlap": "https://arxiv.org/abs/2504.19519",
    "CUTLASS distributed GEMM": "https://blog.shi-labs.com/distributed-gemm-88be6a481e2b",
}
"""The places where others published times."""

_AG, _RS = "all_gather_matmul", "matmul_reduce_scatter"
PUBLISHED = (
    Published(_AG, 2048, 3584, 8192, "plain", 0.301, "torch, NCCL and cuBLAS"),
    Published(_AG, 2048, 3584, 8192, "torch's", 0.354, "torch, decomposed"),
    Published(_AG, 2048, 3584, 8192, "fused", 0.295, "torch, native"),
    Published(_AG, 16384, 3584, 8192, "matmul alone", 1.672, "Triton recipes"),
    Published(_AG, 16384, 3584, 8192, "plain", 2.541, "Triton recipes"),
    Published(_AG, 16384, 3584, 8192, "fused", 1.846, "Triton recipes"),
    Published(_RS, 512, 4096, 14336, "plain", 0.134, "kraken"),
    Published(_RS, 512, 4096, 14336, "torch's", 0.614, "kraken"),
    Published(_RS, 512, 4096, 14336, "fused", 0.308, "kraken, Triton and copy engine"),
    Published(_RS, 2048, 4096, 14336, "plain", 0.423, "kraken"),
    Published(_RS, 2048, 4096, 14336, "torch's", 0.755, "kraken"),
    Published(_RS, 2048, 4096, 14336, "fused", 0.410, "kraken, Triton and copy engine"),
)


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
    parser.add_argument(
        "--published", action="store_true", help="compare predictions with times that others have published"
    )
    options = parser.parse_args(arguments)
    device = Device(options.device, options.waits == "memory")
    if options.published:
        print("\n".join([*published_lines(), "", *range_lines(), "", *source_lines()]))
        return 0
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
    lines = [_line(widths, header)]
    gains: list[tuple[float, float, float]] = []
    for shape, short, row in rows_of(device, world, found):
        gains.append(row.gains)
        plain, torchs, ours, fused = (f"{each.total:.3f}" for each in row)
        gain, to_torch, of_fused = (f"{each:.2f}" for each in row.gains)
        size = f"{shape.m}, {shape.n}, {shape.k}"
        cells = plain, torchs, ours, _how(row.ours), gain, to_torch, fused, _how(row.fused), of_fused
        lines.append(_line(widths, (shape.label, short, size, *cells)))
    if gains:
        gain, to_torch, of_fused = (
            f"{math.exp(sum(map(math.log, each)) / len(gains)):.2f}" for each in zip(*gains, strict=True)
        )
        lines.append(_line(widths, ("geometric mean", *[""] * 6, gain, to_torch, "", "", of_fused)))
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
    torchs = predict_plan(described, costs, TORCHS[op](0, world), "torch", 1)
    ours = next(each for each in choice.predictions if (each.path, each.chunks) == (choice.path, choice.chunks))
    fused = min((each for each in choice.predictions if each.path == "fused"), key=lambda each: each.total)
    return Row(predict_plain(described, costs), torchs, ours, fused)


def _how(each: Prediction) -> str:
    return "whole" if each.path == "sequential" else f"{each.chunks} chunk{'s' * (each.chunks > 1)}"


def published_lines() -> list[str]:
    """Return lines that compare the times that others measured on 8 H100 with the model's predictions."""
    widths = (22, 18, 46, 10, 10, 8)
    lines = [_line(widths, ("op", "M, N, K", "what, and who published it", "published", "predicted", "ratio"))]
    for each in PUBLISHED:
        row = predictions(each.op, each.m, each.n, each.k, Device("H100"), 8)
        ways = {"plain": row.plain.total, "torch's": row.torchs.total, "fused": row.fused.total}
        ours = {**ways, "matmul alone": row.plain.matmul}[each.way]
        size, where = f"{each.m}, {each.n}, {each.k}", f"{each.way}: {each.source}"
        numbers = f"{each.time:.3f}", f"{ours:.3f}", f"{ours / each.time:.2f}"
        lines.append(_line(widths, (each.op, size, where, *numbers)))
    return lines


def range_lines() -> list[str]:
    """Return lines that compare published ranges with the model's predictions for the layers of Llama and GPT-3."""
    found = list(rows_of(Device("H100"), 8, shapes.parse(["llama", "gpt3"], 8)))
    gains = [row.gains for _, _, row in found]
    wide = [row for shape, _, row in found if shape.label.endswith(("gate+up", "down"))]
    of_matmul = [(row.plain.matmul / row.ours.total, row.plain.matmul / row.fused.total) for row in wide]
    widths = (48, 34, 16, 16)
    return [
        _line(widths, ("over 16 layers, 8 H100", "published", "predicted, ours", "predicted, fused")),
        _line(widths, ("times as fast as plain", "1.06-1.68 ParallelKittens", _range(gains, 0), _range(gains, 2))),
        _line(widths, ("", "up to 1.65 FlashOverlap", "", "")),
        _line(
            widths,
            (
                "matmul alone, as a part of it, gate+up and down",
                "0.85-0.99 CUTLASS distributed GEMM",
                _range(of_matmul, 0),
                _range(of_matmul, 1),
            ),
        ),
    ]


def source_lines() -> list[str]:
    """Return lines with the places where the times were published."""
    return [_line((26, 60), each) for each in (("published by", "at"), *SOURCES.items())]


def _range(values: Sequence[Sequence[float]], at: int) -> str:
    column = [each[at] for each in values]
    return f"{min(column):.2f}-{max(column):.2f}"


def _line(widths: Sequence[int], cells: Sequence[str]) -> str:
    """Format one line. Wide columns contain words and are left-aligned. Narrow ones contain numbers."""
    words = (
        cell.ljust(width) if width in (4, 9) or width > 12 else cell.rjust(width)
        for width, cell in zip(widths, cells, strict=True)
    )
    return " ".join(words).rstrip()


if __name__ == "__main__":
    sys.exit(main())
