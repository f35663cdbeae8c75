"""Measure the sleep trick: which of a plan's two compute streams starts first, and the cost of enforcing an order.

    python -m bench.start_order --emulate 8 --json result.json
    torchrun --nproc-per-node 8 -m bench.start_order

Both compute streams of a matmul-reduce-scatter get their first matmul at the same time, and CUDA does not specify which
one starts first. Ahead of each matmul, a kernel of one thread writes the GPU's time. The sleep trick delays the
caller's stream for a moment, so that the other stream starts first on every rank.

``equal`` counts runs in which both streams started at the same time, as far as the GPU's clock can tell. ``agree``
counts runs in which the same stream started first on all ranks. If the ranks do not agree, each barrier waits for the
slower rank, which the trick is meant to avoid. The phantoms of an emulated group always do the same as the real rank,
so an emulated table shows the cost of the trick, but not its gain.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import symm_overlap
from bench.emulation.link import Link
from bench.emulation.rank import emulated
from bench.harness import shapes
from bench.harness.case import OPS, Case, inputs
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, first_rank, launch, leave, under_torchrun
from bench.harness.report import environment_lines
from bench.harness.timing import Timed, time_methods
from bench.methods import published
from symm_overlap import _C
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import Transform, transformed

STREAMS = ("compute0", "compute1")
_EQUAL = -1
_AHEAD = 20_000_000  # cycles, about 10 ms, in which the host issues the whole call


class Clock(Protocol):
    """Records the times at which streams reach certain points."""

    def stamp(self, index: int) -> None:
        """Record the time at which the current stream gets here, under ``index``."""

    def read(self) -> list[int]:
        """Wait until the device is done. Return the times of all indices, in nanoseconds."""


class GpuClock:
    """A clock that uses the global timer of a GPU."""

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
    """A plan, and the means that keeps the order of its streams."""

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
    """Return a step transform that records when the first matmul of each compute stream is about to start."""

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
    """Return, for each run, the times at which the first matmul of each stream was about to start."""
    a, b = inputs(case, rank.rank, "normal", rank.device)
    found = []
    with transformed(variant.transform, stamping(clock)):
        for run in range(1 + runs):  # the first run allocates the workspace and is not counted
            rank.start.wait()
            if rank.device.type == "cuda":
                torch.cuda._sleep(_AHEAD)
            variant.call(rank, case, a, b)
            times = clock.read()
            if run:
                found.append(times)
    return found


def counted(ranks: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Count how often each stream started first, or both at once, and how often all ranks had the same first stream.

    Args:
        ranks: the result of `starts` on each rank.
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
    """Return a row for each variant of each case. Every rank returns the same rows."""
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
    """Format a line for each row."""
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
    """Measure and print. Return 0, or 2 for bad arguments or without a GPU."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.start_order", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--emulate", type=int, metavar="W", help="emulate W ranks: 1 real rank and W - 1 peers that are only memory"
    )
    parser.add_argument("--world", type=int, default=2, help="number of ranks without --emulate (default 2)")
    parser.add_argument("--link", default="369GB/s", help="with --emulate: see bench.collective_matmul")
    parser.add_argument("--shapes", nargs="+", default=["8192,8192,3584"], metavar="SET|M,N,K")
    parser.add_argument("--runs", type=int, default=200, help="runs of each variant (default 200)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of all variants (default 15)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.emulate or options.world
    try:
        if world < 2 or options.runs < 1 or options.rounds < 1:
            raise ValueError("too few ranks, runs or rounds: give 2 ranks or more, and --runs and --rounds 1 or more")
        link = Link.parse(options.link)
        cases = [
            Case(OPS["rs"], shape.m, shape.n, shape.k, torch.bfloat16, world, shape.label)
            for shape in shapes.parse(options.shapes, world)
            if "rs" in shape.ops
        ]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available() or not _C.with_cuda:
        parser.error("needs a GPU: on a CPU streams are threads, and the operating system decides which starts first")
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
        write_json(options.json, described, emulated=bool(options.emulate), link=link.name, rows=rows)
    return 0


if __name__ == "__main__":
    leave(main())
