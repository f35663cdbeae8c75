"""``symm-overlap schedule search``: find the pipeline schedule that takes the least time for the costs of a model."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..pipeline import write_csv
from ..pipeline.cost_file import read_costs
from ..pipeline.layer_costs import LayerCosts
from ..pipeline.search import PARTITIONS, SearchResult, search
from ..pipeline.search.find import STAGES_PER_RANK, STEPS
from .mistakes import report_errors, require_at_most, require_distinct, require_writable, write_file

BAR_WIDTH = 24
MOST_CELLS = 1_000_000
"""The largest table that is simulated, in cells."""
_MOST_LAYERS = 1000
"""The most layers that are divided into stages. The time grows with their square, for every schedule that is tried."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command's parser, and return it."""
    parser = subparsers.add_parser(
        "search", help="find the fastest schedule for a model's costs, under a memory cap", description=__doc__
    )
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="number of ranks")
    add("--microbatches", type=int, required=True, metavar="N", help="number of microbatches")
    add("--cost", type=Path, required=True, metavar="FILE", help="costs of the model's layers, as TOML")
    add("--memory-cap", type=float, default=math.inf, metavar="M", help="most memory for the activations of a rank")
    counts = ",".join(map(str, STAGES_PER_RANK))
    add("--stages-per-rank", default=counts, metavar="N,...", help=f"numbers to try (default {counts})")
    add("--partition", choices=PARTITIONS, default="balanced", help="how layers form stages (default balanced)")
    add("--seed", type=int, default=0, help="the same seed gives the same schedule (default 0)")
    add("--steps", type=int, default=STEPS, metavar="N", help=f"most schedules to simulate (default {STEPS})")
    add("--out", type=Path, metavar="FILE", help="write the compute actions of the schedule as CSV")
    add("--lowered", type=Path, metavar="FILE", help="write the schedule with its messages and gathers as CSV")
    return parser


@report_errors("schedule search")
def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 for success, 1 if no schedule fits the memory cap, 2 for wrong arguments."""
    require_distinct(cost=args.cost, out=args.out, lowered=args.lowered)
    layers, counts = _costs(args.cost), _counts(args.stages_per_rank)
    require_at_most(_MOST_LAYERS, layers.layers, "layers")
    require_at_most(MOST_CELLS, args.ranks * (args.microbatches + args.ranks), "ranks * (microbatches + ranks)")
    for path in filter(None, (args.out, args.lowered)):
        require_writable(path)
    try:
        found = _search(args, layers, counts)
    except ValueError as error:
        if not str(error).startswith("no schedule fits"):
            raise
        print(f"symm-overlap schedule search: {error}", file=sys.stderr)
        return 1
    print(found)
    print(f"layers of each stage: {' '.join(map(str, found.sizes))}")
    for path, schedule in ((args.out, found.schedule), (args.lowered, found.lowered)):
        if path is not None:
            write_file(path, write_csv(schedule))
    return 0


def _search(args: argparse.Namespace, layers: LayerCosts, counts: Sequence[int]) -> SearchResult:
    """Search, with a progress bar."""
    bar = Bar(sys.stderr)
    try:
        return search(
            args.ranks,
            args.microbatches,
            layers,
            memory_cap=args.memory_cap,
            stages_per_rank=counts,
            partition=args.partition,
            seed=args.seed,
            steps=args.steps,
            progress=bar.step,
        )
    finally:
        bar.clear()


def _costs(path: Path) -> LayerCosts:
    """Read the costs in a file."""
    try:
        return read_costs(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _counts(text: str) -> list[int]:
    """Parse the numbers of stages per rank."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--stages-per-rank is {text!r}: give numbers separated by commas, such as 1,2,4") from None


class Bar:
    """A progress bar, shown only if the output is a terminal. None is an output that is closed."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out if out is not None and out.isatty() else None
        self._last = 0.0

    def step(self, done: int, steps: int, best: float) -> None:
        """Show how many schedules have been simulated. Updates at most ten times a second."""
        now = time.monotonic()
        if self._out is None or now - self._last < 0.1:
            return
        self._last = now
        filled = min(BAR_WIDTH, done * BAR_WIDTH // steps)
        so_far = "" if best == math.inf else f"  best {best:.6g}"
        self._out.write(f"\r[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done}/{steps} schedules{so_far}\x1b[K")
        self._out.flush()

    def clear(self) -> None:
        """Remove the bar."""
        if self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()
