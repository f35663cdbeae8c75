"""Convert schedules to and from the tables of torch.distributed.pipelining.

Torch's table is a dictionary. For each rank it has the list of the rank's actions, with None in empty cells. Torch's
schedules store such tables in ``pipeline_order`` and ``pipeline_order_with_comms``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ._torch import TorchAction, TorchKind
from .action import Action
from .schedule import Schedule, where


def to_torch(schedule: Schedule) -> dict[int, list[TorchAction | None]]:
    """Return the table of a schedule in torch's form.

    Raises:
        ValueError: torch cannot represent the schedule: it has two pipelines in one table, or a kind of action that the
            installed torch does not know.
    """
    if schedule.pipelines > 1:
        raise ValueError(
            f"torch's tables have one first and one last stage, but this schedule has {schedule.pipelines} pipelines: "
            "DualPipeV is the form of DualPipe that torch can run"
        )
    known: dict[Action, TorchAction] = {}
    table: dict[int, list[TorchAction | None]] = {}
    for rank, row in enumerate(schedule.rows):
        table[rank] = []
        for cell, action in enumerate(row):
            try:
                table[rank].append(None if action is None else known.get(action) or _to_torch(action, known))
            except ValueError as error:
                raise ValueError(f"{where(rank, cell)}: torch {torch.__version__} has no {action}") from error
    return table


def from_torch(table: Mapping[int, Sequence[TorchAction | None]]) -> Schedule:
    """Return the schedule of torch's table.

    The rank of each stage and the number of microbatches are derived from the actions.

    Args:
        table: for each rank, its actions, with None in empty cells.

    Raises:
        ValueError: the ranks of the table are not 0, 1, ..., an action is not an `Action`, or the actions do not form a
            schedule (`Schedule.from_rows`). The message names the row and the cell, both counted from 1.
    """
    if sorted(table) != list(range(len(table))):
        raise ValueError(f"expected a table of ranks 0 to {len(table) - 1}, and found ranks {sorted(table)}")
    rows: list[list[Action | None]] = []
    for rank in range(len(table)):
        rows.append([])
        for cell, action in enumerate(table[rank]):
            try:
                rows[-1].append(None if action is None else Action.parse(str(action)))
            except ValueError as error:
                raise ValueError(f"{where(rank, cell)}: {error}") from error
    return Schedule.from_rows(rows)


def _to_torch(action: Action, known: dict[Action, TorchAction]) -> TorchAction:
    """Return torch's action for an `Action`, and cache it in ``known``.

    Raises:
        ValueError: the installed torch does not have the kind.
    """
    parts = tuple(_to_torch(part, known) for part in action.parts)
    known[action] = TorchAction(action.stage, TorchKind(action.kind), action.microbatch, parts or None)
    return known[action]
