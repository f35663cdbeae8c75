"""Schedules that are written as text, lowered or changed, for the tests of the verifier and of the simulators."""

from __future__ import annotations

from collections.abc import Callable

from symm_overlap.pipeline import Action, Schedule
from symm_overlap.pipeline.simulation.encoded import encode, with_messages

# 1F1B of two ranks, with the empty cells of the golden tables.
TWO_RANKS = ("0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1,")
# A V schedule of two ranks and four stages, with a split backward. Stages 1 and 2 are on rank 1.
V_SPLIT = (
    "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1",
    "1F0,2F0,1F1,2F1,2I0,1I0,2W0,1W0,2I1,1I1,2W1,1W1",
)

Rows = list[list[Action | None]]


def table(*rows: str, **arguments: object) -> Schedule:
    """Return the schedule of some rows of text, with commas between cells."""
    parsed = [[Action.parse(cell) if cell.strip() else None for cell in row.split(",")] for row in rows]
    return Schedule.from_rows(parsed, **arguments)  # type: ignore[arg-type]


def lowered(*rows: str, **arguments: object) -> Schedule:
    """Return the schedule of some rows of text, with sends and receives added."""
    return with_messages(encode(table(*rows, **arguments))).schedule()


def changed(schedule: Schedule, change: Callable[[Rows], object]) -> Schedule:
    """Return the schedule after a change to its rows, without checks."""
    rows = [list(row) for row in schedule.rows]
    change(rows)
    return schedule.with_rows(rows)


def at(rows: Rows, rank: int, action: str) -> int:
    """Return the cell number of an action."""
    return rows[rank].index(Action.parse(action))


def drop(rank: int, action: str) -> Callable[[Rows], object]:
    """Return a change that removes an action."""
    return lambda rows: rows[rank].pop(at(rows, rank, action))


def insert(rank: int, before: str, action: str) -> Callable[[Rows], object]:
    """Return a change that inserts an action before another one."""
    return lambda rows: rows[rank].insert(at(rows, rank, before), Action.parse(action))


def swap(rank: int, first: str, second: str) -> Callable[[Rows], object]:
    """Return a change that swaps the cells of two actions."""

    def change(rows: Rows) -> None:
        one, other = at(rows, rank, first), at(rows, rank, second)
        rows[rank][one], rows[rank][other] = rows[rank][other], rows[rank][one]

    return change
