"""Read and write schedules as CSV: one line for each rank, one cell for each action. An empty cell has no text.

This is the format of the CSV files of torch.distributed.pipelining, both for schedules that only compute and for those
with communication. `read_csv` restores exactly the table that `write_csv` has written: empty cells are kept, also at
the end of a line.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from .action import Action
from .schedule import Schedule, where


def write_csv(schedule: Schedule, dialect: str = "torch") -> str:
    """Return the table of a schedule as CSV text, with the line ends of RFC 4180.

    Args:
        schedule: the schedule to write.
        dialect: see `symm_overlap.pipeline.action.DIALECTS`; torch reads "torch".

    Raises:
        ValueError: there is no such dialect.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for row in schedule.rows:
        writer.writerow("" if action is None else action.text(dialect) for action in row)
    return text.getvalue()


def read_csv(text: str, dialect: str = "torch", *, pipelines: int | None = None) -> Schedule:
    """Return the schedule that a CSV text contains.

    The rank of each stage and the number of microbatches are derived from the actions.

    Args:
        text: the CSV text.
        dialect: see `symm_overlap.pipeline.action.DIALECTS`.
        pipelines: see `Schedule`. A table does not contain this number. By default it is 2 if each half of the stages
            has only its own half of the microbatches, as in DualPipe, else 1.

    Raises:
        ValueError: a cell is not an action, or the actions do not form a schedule (see `Schedule.from_rows`). The
            message names the row and the cell, both counted from 1, and what was expected there.
    """
    try:
        cells = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise ValueError(f"the text is not CSV: {error}") from error
    rows: list[list[Action | None]] = []
    for index, line in enumerate(cells):
        rows.append([])
        for cell, written in enumerate(line):
            try:
                rows[-1].append(Action.parse(written, dialect) if written.strip() else None)
            except ValueError as error:
                raise ValueError(f"{where(index, cell)}: {error}") from error
    if pipelines is not None:
        return Schedule.from_rows(rows, pipelines=pipelines)
    one = Schedule.from_rows(rows)
    return replace(one, pipelines=2) if _has_two_pipelines(one) else one


def _has_two_pipelines(schedule: Schedule) -> bool:
    if schedule.stages % 2 or schedule.microbatches % 2:
        return False
    halves: tuple[set[int], set[int]] = (set(), set())
    for row in schedule.rows:
        for leaf in (leaf for action in row if action is not None for leaf in action.leaves):
            if leaf.microbatch is not None:
                halves[leaf.stage >= schedule.stages // 2].add(leaf.microbatch)
    return bool(halves[0] and halves[1]) and max(halves[0]) < schedule.microbatches // 2 <= min(halves[1])
