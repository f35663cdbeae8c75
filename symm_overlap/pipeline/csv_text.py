"""Schedules as CSV: one line for each rank, one cell for each action, nothing in an empty cell.

It is the format of the CSV files of torch.distributed.pipelining, both of schedules that only compute and of those with
communication. What is written is read back as the same table: empty cells stay, also at the end of a line.
"""

from __future__ import annotations

import csv
import io

from .action import Action
from .schedule import Schedule, where


def write_csv(schedule: Schedule, dialect: str = "torch") -> str:
    """The table of a schedule as CSV, with the line ends of RFC 4180.

    Args:
        dialect: see `symm_overlap.pipeline.action.DIALECTS`; torch reads "torch".

    Raises:
        ValueError: there is no such dialect.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for row in schedule.rows:
        writer.writerow("" if action is None else action.text(dialect) for action in row)
    return text.getvalue()


def read_csv(text: str, dialect: str = "torch", *, pipelines: int = 1) -> Schedule:
    """The schedule of a CSV text. Ranks of stages and the number of microbatches are taken from its actions.

    Args:
        dialect: see `symm_overlap.pipeline.action.DIALECTS`.
        pipelines: see `Schedule`; a table does not say it.

    Raises:
        ValueError: a cell is not an action, or the actions are no schedule (see `Schedule.from_rows`). The message
            names row and cell, both counted from 1, and what was expected there.
    """
    try:
        cells = list(csv.reader(io.StringIO(text, newline="")))
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
    return Schedule.from_rows(rows, pipelines=pipelines)
