"""Simulate a lowered schedule in which every action takes one step: where ranks idle, and whether the schedule ends.

Every rank runs its row in order, at most one action a step. Empty cells are skipped. An action runs when these
conditions hold:

- A receive runs at the step of its send or later.
- A forward needs its receive at an earlier step, or the forward of the stage before if that is on the same rank.
- A backward likewise needs its receive, or the backward of the stage behind it.
- A send needs the action that computes what it sends, at an earlier step.
- A weight gradient needs nothing. Other actions, such as UNSHARD, are ready at once.
- A compound takes one step and needs everything that its parts need.

The resulting tables equal those of torch.distributed.pipelining from 2.6 on (pytorch/pytorch pull request 138928), but
torch rejects UNSHARD and compounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import _sim
from ...plan.work import integers
from ..action import MESSAGES, Action
from ..schedule import Schedule
from .encoded import Encoded, encode

SHOWN = 40
"""A `DeadlockError` shows this many of the last steps of the table."""


class DeadlockError(ValueError):
    """The ranks wait for each other for ever, or for an action that no rank runs.

    The message shows the table up to the deadlock.

    Attributes:
        partial: the simulation up to the deadlock.
        next_actions: for each rank that is stuck, the action that it cannot run.
    """

    def __init__(self, partial: UnitTime) -> None:
        self.partial = partial
        self.next_actions = partial.next_actions()
        lines = [f"    rank {rank} cannot run {action}" for rank, action in self.next_actions.items()]
        table = partial.text(first=max(0, partial.length - SHOWN))
        encoded, decode = partial.encoded, partial.encoded.decoder()
        leaves = (leaf for cell in encoded.cells if (action := decode(cell)) for leaf in action.leaves)
        why = "the schedule deadlocks"
        if encoded.ranks > 1 and not any(leaf.kind in MESSAGES for leaf in leaves):
            why += ", because it has no sends and receives (symm_overlap.pipeline.lower adds them)"
        super().__init__("\n".join([f"{why}:", *lines, "It ran up to here:", table]))


@dataclass(frozen=True)
class UnitTime:
    """When each action of a schedule runs.

    Attributes:
        encoded: the schedule.
        steps: for each cell, its step, from 0; -1 for an empty cell and for a cell that is never reached.
        length: the number of steps.
    """

    encoded: Encoded
    steps: memoryview[int]
    length: int

    def table(self) -> tuple[tuple[Action | None, ...], ...]:
        """Return, for each rank, its action at each step up to its last action. None is a step at which it idles."""
        decode = self.encoded.decoder()
        rows = []
        for rank in range(self.encoded.ranks):
            cells = range(self.encoded.starts[rank], self.encoded.starts[rank + 1])
            row: list[Action | None] = [None] * (max((self.steps[cell] for cell in cells), default=-1) + 1)
            for cell in cells:
                if self.steps[cell] >= 0:
                    row[self.steps[cell]] = decode(self.encoded.cells[cell])
            rows.append(tuple(row))
        return tuple(rows)

    def idle(self) -> tuple[int, ...]:
        """Return, for each rank, the number of steps at which it runs nothing."""
        return tuple(
            self.length - sum(step >= 0 for step in self.steps[start:stop])
            for start, stop in zip(self.encoded.starts, self.encoded.starts[1:], strict=False)
        )

    def next_actions(self) -> dict[int, Action]:
        """Return, for each rank that did not reach the end of its row, the first action that did not run."""
        decode, found = self.encoded.decoder(), {}
        for rank in range(self.encoded.ranks):
            for cell in range(self.encoded.starts[rank], self.encoded.starts[rank + 1]):
                action = decode(self.encoded.cells[cell])
                if action is not None and self.steps[cell] < 0:
                    found[rank] = action
                    break
        return found

    def text(self, first: int = 0) -> str:
        """Return the table as text: a line for each step from ``first`` on, and a column for each rank."""
        rows = self.table()
        steps = range(first, self.length)
        columns = [
            [str(row[step]) if step < len(row) and row[step] is not None else "" for step in steps] for row in rows
        ]
        digits = max(2, len(str(self.length - 1)))
        heads = ["", *(f"Rank {rank}" for rank in range(len(rows)))]
        names = [f"Step {step:0{digits}}:" for step in steps]
        table = [[head, *column] for head, column in zip(heads, [names, *columns], strict=True)]
        widths = [max(map(len, column)) for column in table]
        padded = [[cell.ljust(width) for cell in column] for column, width in zip(table, widths, strict=True)]
        lines = zip(*padded, strict=True)
        return "\n".join(" ".join(line).rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text()


def simulate_unit_time(schedule: Schedule | Encoded) -> UnitTime:
    """Simulate a schedule in which every action takes one step, and return the step of each action.

    Args:
        schedule: a schedule with its sends and receives.

    Returns:
        The step of each action. Its text is a table of steps and ranks.

    Raises:
        DeadlockError: a rank cannot go on.
        ValueError: an action is invalid (`encode`). The message names it.
    """
    encoded = schedule if isinstance(schedule, Encoded) else encode(schedule)
    steps, length, complete = _sim.unit_time(encoded)
    result = UnitTime(encoded, integers(steps), length)
    if not complete:
        raise DeadlockError(result)
    return result
