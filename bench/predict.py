"""What the cost model predicts: the plain collective, the plan that torch publishes, and ours. Nothing is run.

    python -m bench.predict
    python -m bench.predict --published

Both plans are issued, and their steps cost, alike: what differs is the plan. So the table says nothing of how either is
implemented, and nothing of what was not modelled, such as copies and matmuls that slow each other down.
``--published`` predicts calls on 8 H100 whose times others have published, for the error of the model.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from bench.harness import shapes
from bench.harness.case import OPS
from symm_overlap.collective.choice import Prediction
from symm_overlap.collective.chooser import choose
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.collective.prediction import predict_plan
from symm_overlap.collective.problem import Problem, problem
from symm_overlap.plan import Plan
from symm_overlap.runtime import TRAITS, Device, DeviceCosts, costs_of
from symm_overlap.settings import Settings

TORCHS: dict[str, Callable[[int, int], Plan]] = {
    "all_gather_matmul": torch_all_gather_matmul,
    "matmul_reduce_scatter": torch_matmul_reduce_scatter,
}
DTYPE = torch.bfloat16


class Published(NamedTuple):
    """A call on 8 H100 and what its authors say it takes, in milliseconds."""

    op: str
    m: int
    n: int
    k: int
    plain: float
    torchs: float
    source: str


PUBLISHED = (
    Published("all_gather_matmul", 2048, 3584, 8192, 0.301, 0.354, "torch, async tensor parallelism"),
    Published("matmul_reduce_scatter", 512, 4096, 14336, 0.134, 0.614, "kraken"),
    Published("matmul_reduce_scatter", 2048, 4096, 14336, 0.423, 0.755, "kraken"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 0, or 2 for bad arguments."""
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
        help=f"{', '.join(shapes.SETS)}, or M,N,K with M gathered (default llama gpt3)",
    )
    parser.add_argument("--published", action="store_true", help="predict calls whose times others have published")
    options = parser.parse_args(arguments)
    costs = costs_of(TRAITS["cuda"].costs, Device(options.device))
    if options.published:
        print("\n".join(published_lines()))
        return 0
    try:
        if options.world < 2:
            raise ValueError(f"--world is {options.world}: there must be at least 2 ranks")
        found = shapes.parse(options.shapes, options.world)
    except ValueError as error:
        parser.error(str(error))
    print(f"predicted, not measured: {options.world} {costs.name}, bfloat16, times in ms")
    print("\n".join(table(costs, options.world, found)))
    return 0


def table(costs: DeviceCosts, world: int, found: Iterable[shapes.Shape]) -> list[str]:
    """A row for each op of each shape, and the geometric means."""
    widths = (23, 4, 20, 8, 8, 8, 14, 8, 8)
    lines = [_line(widths, ("layer", "op", "M, N, K", "plain", "torch's", "ours", "", "x plain", "x torch"))]
    gains: list[tuple[float, float]] = []
    for shape in found:
        for short in (name for name in shape.ops if OPS[name] in TORCHS):
            plain, torchs, ours = predictions(OPS[short], shape.m, shape.n, shape.k, costs, world)
            gains.append((plain.total / ours.total, torchs.total / ours.total))
            how = "plain" if ours.path == "sequential" else f"{ours.chunks} chunk{'s' * (ours.chunks > 1)}"
            size = f"{shape.m}, {shape.n}, {shape.k}"
            times = f"{plain.total:.3f}", f"{torchs.total:.3f}", f"{ours.total:.3f}", how
            lines.append(_line(widths, (shape.label, short, size, *times, *(f"{gain:.2f}" for gain in gains[-1]))))
    if gains:
        means = (math.exp(sum(map(math.log, each)) / len(gains)) for each in zip(*gains, strict=True))
        lines.append(_line(widths, ("geometric mean", *[""] * 6, *(f"{mean:.2f}" for mean in means))))
    return lines


def predictions(
    op: str, m: int, n: int, k: int, costs: DeviceCosts, world: int
) -> tuple[Prediction, Prediction, Prediction]:
    """The plain collective and matmul, torch's plan, and what the chooser takes."""
    described: Problem = problem(op, m, n, k, DTYPE, world, "cuda")
    choice = choose(described, Settings(), direct=True, device=Device(costs.name))
    plain = choice.predictions[0]
    torchs = predict_plan(described, costs, TORCHS[op](0, world), "torch", 1)
    ours = next(each for each in choice.predictions if (each.path, each.chunks) == (choice.path, choice.chunks))
    return plain, torchs, ours


def published_lines() -> list[str]:
    """What others measured on 8 H100 beside what the model says, and the ratio of the two."""
    costs = costs_of(TRAITS["cuda"].costs, Device("H100"))
    widths = (22, 18, 42, 10, 10, 8)
    lines = [_line(widths, ("op", "M, N, K", "what, and who published it", "published", "predicted", "ratio"))]
    for each in PUBLISHED:
        plain, torchs, _ = predictions(each.op, each.m, each.n, each.k, costs, 8)
        for what, theirs, ours in (("plain", each.plain, plain), ("torch's", each.torchs, torchs)):
            where = f"{what}: {each.source}"
            size = f"{each.m}, {each.n}, {each.k}"
            numbers = f"{theirs:.3f}", f"{ours.total:.3f}", f"{ours.total / theirs:.2f}"
            lines.append(_line(widths, (each.op, size, where, *numbers)))
    return lines


def _line(widths: Sequence[int], cells: Sequence[str]) -> str:
    """Wide columns have words, which stand on the left; narrow ones have numbers."""
    words = (
        cell.ljust(width) if width == 4 or width > 12 else cell.rjust(width)
        for width, cell in zip(widths, cells, strict=True)
    )
    return " ".join(words).rstrip()


if __name__ == "__main__":
    sys.exit(main())
