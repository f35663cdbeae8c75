"""The tables that ``symm-overlap schedule`` prints: schedules, and the results of simulations."""

from __future__ import annotations

from collections.abc import Sequence

from ..pipeline import Schedule
from ..pipeline.simulation.cost_result import CostResult


def title(schedule: Schedule, source: str) -> str:
    """Return one line that describes a schedule."""
    counts = ((schedule.ranks, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "microbatch"))
    parts = [f"{count} {name}{('es' if name.endswith('h') else 's') * (count != 1)}" for count, name in counts]
    return f"{source}: {', '.join(parts)}, {schedule.size} actions"


def describe(schedule: Schedule) -> str:
    """Return a table of a schedule's cells, with a column for each rank. In an empty cell the rank waits.

    The table ends with the last action: rows made as in torch may end with empty cells.
    """
    length = max((1 + cell for row in schedule.rows for cell, action in enumerate(row) if action), default=0)
    columns = [[str(row[cell] or "") if cell < len(row) else "" for cell in range(length)] for row in schedule.rows]
    digits = max(2, len(str(length - 1)))
    return _aligned(
        ["", *(f"Rank {rank}" for rank in range(schedule.ranks))],
        [[f"Cell {cell:0{digits}}:", *(column[cell] for column in columns)] for cell in range(length)],
        left=True,
    )


def per_rank(result: CostResult) -> str:
    """Return how long the step takes, a table with a row for each rank, and the critical path."""
    lines = [
        f"makespan {result.makespan:.3f} ms, longest rank span {result.longest_span:.3f} ms",
        _aligned(
            ["rank", "computes", "idle", "idle in span", "exposed", "peak activations", "peak memory"],
            [
                [
                    str(rank),
                    *(
                        f"{figure:.3f}"
                        for figure in (
                            result.busy[rank],
                            result.bubbles[rank],
                            result.bubbles_in_span[rank],
                            result.exposed[rank],
                        )
                    ),
                    f"{max(use.activations for use in result.memory(rank)):g}",
                    f"{result.peak_memory(rank):g}",
                ]
                for rank in range(result.encoded.ranks)
            ],
        ),
        f"critical path: {_critical_path(result)}",
    ]
    return "\n".join(lines)


def side_by_side(rows: Sequence[tuple[str, Schedule, int, CostResult]]) -> str:
    """Return a table with a row for each schedule: its name, its steps in unit time, and the simulated results.

    Idle time and memory are each from the rank with the most. The unit of activations is the activations that all
    layers of a rank keep for one microbatch; the unit of parameters is the parameters of a rank.
    """
    return _aligned(
        [
            "schedule",
            "stages a rank",
            "steps",
            "makespan ms",
            "idle %",
            "exposed ms",
            "peak activations",
            "peak memory",
        ],
        [
            [
                source,
                f"{schedule.stages / schedule.ranks:g}",
                str(steps),
                f"{result.makespan:.3f}",
                f"{100 * max(result.bubbles) / result.makespan if result.makespan else 0:.1f}",
                f"{max(result.exposed):.3f}",
                f"{max(use.activations for rank in range(schedule.ranks) for use in result.memory(rank)):g}",
                f"{max(map(result.peak_memory, range(schedule.ranks))):g}",
            ]
            for source, schedule, steps, result in rows
        ],
    )


_MOST = 12
"""How many actions are shown from each end of the critical path."""


def _critical_path(result: CostResult) -> str:
    """Return the actions that determine how long the step takes, each followed by its rank."""
    path = [f"{timed.action}@{timed.rank}" for timed in result.critical_path]
    if len(path) > 2 * _MOST:
        path[_MOST:-_MOST] = [f"... {len(path) - 2 * _MOST} more ..."]
    return " ".join(path)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]], left: bool = False) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if left or not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " if left else "  ").join(cells).rstrip())
    return "\n".join(lines)
