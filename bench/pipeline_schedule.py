"""Time to lower and simulate pipeline schedules: ours, torch, and a quadratic search.

    python -m bench.pipeline_schedule --json result.json

Each way starts from a schedule's compute actions in its own format, inserts sends and receives, and simulates in unit
time. ``ours`` is csrc/sim, including the conversion from Python's actions. ``torch`` uses the functions of
torch.distributed.pipelining. ``search`` looks through all earlier actions for the inputs of an action, as torch did
before it kept sets. All ways must find the same number of steps. ``cost`` is how many actions a second the cost
simulator runs. Times are processor time. Nothing here ever waits, so processor time is complete, and other programs on
the machine disturb it less than wall time.

Targets: at most 100 ms for the largest case and 50 times as fast as torch there; at most 10 ms for every case of up to
32 ranks; 2 million actions a second with costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed.pipelining import schedules as torchs

from bench import pipeline_reference as reference
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.report import environment_lines
from symm_overlap.pipeline import Schedule, to_torch
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.simulation.cost import simulate_cost
from symm_overlap.pipeline.simulation.encoded import encode, with_messages
from symm_overlap.pipeline.simulation.unit_time import simulate_unit_time

LARGEST_MS, UP_TO_32_RANKS_MS, TIMES_TORCH, MILLION_ACTIONS = 100.0, 10.0, 50.0, 2.0
SEARCH_AT_MOST = 7_000
"""Largest number of actions for which the quadratic search is run. With more, it takes minutes."""


class Case(NamedTuple):
    """The parameters of a schedule to be generated."""

    name: str
    stages_per_rank: int
    microbatches: int
    ranks: int


CASES = (
    Case("1F1B", 1, 8, 4),
    Case("Interleaved1F1B", 2, 8, 4),
    Case("ZBVZeroBubble", 2, 32, 8),
    Case("Interleaved1F1B", 4, 32, 8),
    Case("Interleaved1F1B", 2, 64, 32),
    Case("InterleavedZeroBubble", 2, 64, 32),
    Case("ZBVZeroBubble", 2, 128, 64),
    Case("LoopedBFS", 4, 128, 64),
    Case("InterleavedZeroBubble", 4, 128, 64),
    Case("Interleaved1F1B", 4, 128, 64),
)
LARGEST = CASES[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if the targets are met, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline_schedule", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=LARGEST.ranks, help="run only cases of at most this many ranks (default 64)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of ours; the median counts (default 5)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.ranks <= options.ranks]
    if options.rounds < 1 or not cases:
        parser.error(f"--rounds is {options.rounds} and --ranks {options.ranks}: give 1 and {CASES[0].ranks}, or more")
    described = environment("cpu", 1, 1)
    print(environment_lines(described))
    print("\n  milliseconds to lower and simulate; cost: million actions a second")
    heads = ("ours", "torch", "search", "x torch", "cost")
    print(f"  {'schedule':24}{'v':>3}{'m':>5}{'p':>4}{'actions':>9}{'steps':>8}" + "".join(f"{h:>10}" for h in heads))
    rows = []
    for case in cases:
        row = measure(case, options.rounds)
        rows.append(row)
        figures = "".join(_figure(row[key]) for key in ("ours_ms", "torch_ms", "search_ms"))
        print(
            f"  {case.name:24}{case.stages_per_rank:>3}{case.microbatches:>5}{case.ranks:>4}{row['actions']:>9}"
            f"{row['steps']:>8}{figures}{_figure(row['times_torch'])}{_figure(row['million_actions'])}"
        )
    missed = [text for row in rows for text in missed_targets(row)]
    print("\n  targets met" if not missed else "\n  MISSED:\n    " + "\n    ".join(missed))
    write_json(options.json, described, rows=rows)
    return 1 if missed else 0


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Measure one row of the table.

    Raises:
        RuntimeError: the ways found different numbers of steps.
    """
    schedule = generate(case.name, case.ranks, case.microbatches, case.stages_per_rank)
    lowered = with_messages(encode(schedule))
    actions = len(lowered.cells)
    ways: dict[str, tuple[Callable[[], int], int]] = {
        "ours": (lambda: simulate_unit_time(with_messages(encode(schedule))).length, rounds),
        "torch": (_torch(schedule), 1),
    }
    if actions <= SEARCH_AT_MOST:
        ways["search"] = (lambda: _search(schedule), 1)
    found = {name: _timed(way, times) for name, (way, times) in ways.items()}
    steps = {steps for steps, _ in found.values()}
    if len(steps) != 1:
        raise RuntimeError(f"{case} takes { ({name: steps for name, (steps, _) in found.items()}) } steps")
    milliseconds = {f"{name}_ms": found[name][1] if name in found else None for name in (*ways, "search")}
    _, cost = _timed(lambda: len(simulate_cost(lowered).times.order), rounds)
    return {
        **case._asdict(),
        "actions": actions,
        "steps": steps.pop(),
        **milliseconds,
        "times_torch": found["torch"][1] / found["ours"][1],
        "million_actions": actions / cost / 1e3,
    }


def missed_targets(row: dict[str, Any]) -> list[str]:
    """Return a line for each target that a row missed."""
    name = "{name} ({stages_per_rank}, {microbatches}, {ranks})".format(**row)
    largest = row["actions"] > 100_000
    limits = []
    if row["ranks"] <= 32 and row["ours_ms"] > UP_TO_32_RANKS_MS:
        limits.append(f"{name}: {row['ours_ms']:.1f} ms, target {UP_TO_32_RANKS_MS} ms")
    if largest and row["ours_ms"] > LARGEST_MS:
        limits.append(f"{name}: {row['ours_ms']:.1f} ms, target {LARGEST_MS} ms")
    if largest and row["times_torch"] < TIMES_TORCH:
        limits.append(f"{name}: {row['times_torch']:.1f} times as fast as torch, target {TIMES_TORCH}")
    if largest and row["million_actions"] < MILLION_ACTIONS:
        limits.append(f"{name}: {row['million_actions']:.2f} million actions a second, target {MILLION_ACTIONS}")
    return limits


def _torch(schedule: Schedule) -> Callable[[], int]:
    table, stages = to_torch(schedule), schedule.stages

    def run() -> int:
        order = {rank: list(row) for rank, row in table.items()}  # a copy, because torch empties its argument
        lowered = torchs._add_send_recv(order, schedule.placement.__getitem__, stages)  # type: ignore[arg-type]
        simulated = torchs._simulate_comms_compute(lowered, schedule.placement.__getitem__, stages)
        return max(map(len, simulated.values()))

    return run


def _search(schedule: Schedule) -> int:
    lowered = schedule.with_rows(reference.add_send_recv(schedule))
    return max(map(len, reference.simulate(lowered)))


def _timed(call: Callable[[], int], rounds: int) -> tuple[int, float]:
    """Return the result of a call and its median processor time in milliseconds."""
    spent = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        result = call()
        spent.append(time.process_time_ns() - begin)
    return result, statistics.median(spent) / 1e6


def _figure(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.2f}" if value < 100 else f"{value:>10.0f}"


if __name__ == "__main__":
    sys.exit(main())
