"""The sleep trick measured: which of a plan's two compute streams starts first, and what it takes to decide that.

    python -m bench.start_order --emulate 8 --json result.json
    torchrun --nproc-per-node 8 -m bench.start_order

Both streams of a matmul-reduce-scatter get a first matmul at the same time, and CUDA does not say which one starts. A
kernel of one thread ahead of each writes the GPU's time. The sleep trick delays the caller's stream for a moment, so
that the other one starts first on every rank. ``equal`` counts starts at one and the same time, as far as the GPU's
clock can tell, and ``agree`` the runs in which the same stream started first on all ranks: where it does not, each
barrier waits for the slower rank, which is what the trick is to spare. Phantoms of an emulated group always do what the
real rank does, so there the table shows what the trick costs, and not what it gains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import symm_overlap
from bench.emulation.link import Link
from bench.emulation.rank import emulated
from bench.harness import shapes
from bench.harness.case import OPS, Case, inputs
from bench.harness.environment import environment
from bench.harness.launch import Rank, first_rank, launch, leave, under_torchrun
from bench.harness.report import environment_lines
from bench.harness.timing import Timed, time_methods
from bench.methods import published
from symm_overlap import _C
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import Transform, transformed

STREAMS = ("compute0", "compute1")
_EQUAL = -1
_AHEAD = 20_000_000  # cycles, about 10 ms: the host issues the whole call meanwhile


class Clock(Protocol):
    """Notes when streams come to a place."""

    def stamp(self, index: int) -> None:
        """On the current stream: note the time as that of ``index``."""

    def read(self) -> list[int]:
        """Wait until the device is done; the times of all indices, in nanoseconds."""


class GpuClock:
    """The global timer of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._times = torch.zeros(len(STREAMS), dtype=torch.int64, device=device)

    def stamp(self, index: int) -> None:
        """See `Clock.stamp`."""
        _C.stamp(self._times, index)

    def read(self) -> list[int]:
        """See `Clock.read`."""
        torch.cuda.synchronize()
        return [int(time) for time in self._times.tolist()]


class Variant(NamedTuple):
    """A plan, and what keeps its streams in order."""

    plan: str
    order: str
    call: Callable[[Rank, Case, Tensor, Tensor], object]
    transform: Transform


def _as_it_is(plan: Plan, table: Table) -> Table:
    return table


def _without_sleep(plan: Plan, table: Table) -> Table:
    return {kind: function for kind, function in table.items() if kind != "sleep"}


def _torchs(order: str | None, rank: Rank, case: Case, a: Tensor, b: Tensor) -> object:
    with symm_overlap.lane(published.LANE), symm_overlap.force_path("pipelined", chunks=1, streams=2):
        described = published.described_as(case, rank.device.type)
        return published.scatter(rank.group_name, described, a, b, order)


def _ours(rank: Rank, case: Case, a: Tensor, b: Tensor) -> object:
    with symm_overlap.force_path("pipelined", chunks=1, streams=2):
        return symm_overlap.matmul_reduce_scatter(a, b, "sum", 0, rank.group_name)


VARIANTS = (
    Variant("torch's", "nothing", partial(_torchs, None), _as_it_is),
    Variant("torch's", "sleep", partial(_torchs, "sleep"), _as_it_is),
    Variant("torch's", "wait", partial(_torchs, "wait"), _as_it_is),
    Variant("ours", "nothing", _ours, _without_sleep),
    Variant("ours", "sleep", _ours, _as_it_is),
)


def stamping(clock: Clock) -> Transform:
    """A step transform that notes when the first matmul of each compute stream is about to start."""

    def transform(plan: Plan, table: Table) -> Table:
        firsts = {stream: next(step for step in plan.steps if _is_first(step, stream)) for stream in STREAMS}
        produce = table["produce"]

        def noted(step: Step) -> None:
            if step is firsts[step.stream]:
                clock.stamp(STREAMS.index(step.stream))
            produce(step)

        return {**table, "produce": noted}

    return transform


def _is_first(step: Step, stream: str) -> bool:
    return step.kind == "produce" and step.stream == stream


def starts(rank: Rank, case: Case, variant: Variant, runs: int, clock: Clock) -> list[list[int]]:
    """When the first matmul of each stream was about to start, in each of so many runs."""
    a, b = inputs(case, rank.rank, "normal", rank.device)
    found = []
    with transformed(variant.transform, stamping(clock)):
        for run in range(1 + runs):  # the first one makes the workspace
            rank.start.wait()
            if rank.device.type == "cuda":
                torch.cuda._sleep(_AHEAD)
            variant.call(rank, case, a, b)
            times = clock.read()
            if run:
                found.append(times)
    return found


def counted(ranks: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """How often each stream started first, or both at once, and how often the same one was first on all ranks.

    Args:
        ranks: of each rank, what `starts` found.
    """
    first = [[_EQUAL if times[0] == times[1] else times.index(min(times)) for times in runs] for runs in ranks]
    gaps = [abs(times[0] - times[1]) for runs in ranks for times in runs]
    found: dict[str, Any] = {
        f"{name}_first": sum(order.count(stream) for order in first) for stream, name in enumerate(STREAMS)
    }
    equal = sum(order.count(_EQUAL) for order in first)
    agree = sum(len(set(run)) == 1 and run[0] != _EQUAL for run in zip(*first, strict=True))
    return {**found, "equal": equal, "runs": len(first[0]), "agree": agree, "median_gap_ns": statistics.median(gaps)}


def measure(rank: Rank, cases: Sequence[Case], runs: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each variant of each case; every rank returns the same."""
    rows = []
    for case in cases:
        a, b = inputs(case, rank.rank, "normal", rank.device)
        timed = {
            f"{each.plan} {each.order}": Timed(
                partial(each.call, rank, case, a, b), partial(transformed, each.transform)
            )
            for each in VARIANTS
        }
        samples = rank.all(time_methods(rank, timed, rounds))
        for each in VARIANTS:
            found = counted(rank.all(starts(rank, case, each, runs, GpuClock(rank.device))))
            milliseconds = max(statistics.median(one[f"{each.plan} {each.order}"]) for one in samples)
            rows.append({**case.key(), "plan": each.plan, "order": each.order, **found, "median_ms": milliseconds})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row."""
    header = (
        f"  {'M, N, K':20}{'plan':9}{'kept by':9}{'compute0 first':>15}{'compute1 first':>15}{'equal':>7}{'agree':>10}"
    )
    lines = [f"{header}{'gap ns':>9}{'ms':>9}"]
    for row in rows:
        counts = (
            f"{row['compute0_first']:>15}{row['compute1_first']:>15}{row['equal']:>7}{row['agree']:>6}/{row['runs']}"
        )
        size = f"{row['m']}, {row['n']}, {row['k']}"
        lines.append(
            f"  {size:20}{row['plan']:9}{row['order']:9}{counts}{row['median_gap_ns']:>9.0f}{row['median_ms']:>9.3f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 for bad arguments and without a GPU."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.start_order", description=__doc__.splitlines()[0])
    parser.add_argument("--emulate", type=int, metavar="W", help="1 real rank, and W - 1 that are only memory")
    parser.add_argument("--world", type=int, default=2, help="number of ranks without --emulate (default 2)")
    parser.add_argument("--link", default="369GB/s", help="with --emulate: see bench.collective_matmul")
    parser.add_argument("--shapes", nargs="+", default=["8192,8192,3584"], metavar="SET|M,N,K")
    parser.add_argument("--runs", type=int, default=200, help="runs of each variant (default 200)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of all variants (default 15)")
    parser.add_argument("--json", metavar="FILE", help="write environment and rows")
    options = parser.parse_args(arguments)
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.emulate or options.world
    try:
        if world < 2 or options.runs < 1 or options.rounds < 1:
            raise ValueError("there must be 2 ranks or more, and 1 run and round or more")
        link = Link.parse(options.link)
        cases = [
            Case(OPS["rs"], shape.m, shape.n, shape.k, torch.bfloat16, world, shape.label)
            for shape in shapes.parse(options.shapes, world)
            if "rs" in shape.ops
        ]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available() or not _C.with_cuda:
        parser.error("needs a GPU: on a CPU streams are threads, and the system decides which one starts first")
    with ExitStack() as stack:
        if options.emulate:
            rows = measure(stack.enter_context(emulated(world, "cuda", link)), cases, options.runs, options.rounds)
        else:
            rows = launch(measure, world, "cuda", cases, options.runs, options.rounds)[0]
    if first_rank():
        described = environment("cuda", 1 if options.emulate else world, 1)
        how = f"emulated, link {link.name}" if options.emulate else "measured"
        print(
            environment_lines(described), f"\n{how}, {world} ranks, {options.runs} runs of each", table(rows), sep="\n"
        )
        if options.json:
            text = {"environment": described, "emulated": bool(options.emulate), "link": link.name, "rows": rows}
            Path(options.json).write_text(json.dumps(text, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    leave(main())
