"""A plan as text: a row for each stream, and columns that show the order of the steps, not their duration.

The step in a column follows some step in an earlier column: the step before it on its stream, a step of another stream,
or a signal of a peer. A wait (``?1``: for rank 1) is shown in the cell of the step that it holds up, and a signal
(``!3,2``: to ranks 3 and 2) in the cell of the step that it announces. A step that synchronises with a peer and also
moves data, such as a send, has a cell of its own. A picture that is too wide continues below, like a musical score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ..kinds import kind
from ..order import Calls, Order
from ..plan import Plan
from ..step import Step

LEGEND = "?1 waits for a signal of rank 1, !1 signals rank 1; 2.1 is chunk 1 of rank 2"


@dataclass
class _Cell:
    """Consecutive steps of a stream that are shown as one: waits, at most one other step, signals."""

    row: tuple[int, str]
    column: int = 0
    waits: list[Step] = field(default_factory=list)
    main: Step | None = None
    signals: list[Step] = field(default_factory=list)

    def takes(self, step: Step) -> bool:
        """True if the stream's next step belongs in this cell. A step that follows other streams starts a new cell."""
        if step.after:
            return False
        if _mark(step) == "!":
            return True
        return self.main is None and not self.signals

    def add(self, step: Step) -> None:
        if _mark(step) == "?":
            self.waits.append(step)
        elif _mark(step) == "!":
            self.signals.append(step)
        else:
            self.main = step

    def text(self, pieces: bool) -> str:
        words = []
        if self.waits:
            words.append("?" + _peers(self.waits))
        if self.main is not None:
            words.append(self.main.kind)
            if self.main.chunk is not None:
                words.append(self.main.chunk_name(pieces))
            elif kind(self.main.kind).meets == "everyone":
                words.append(self.main.label)
            if arrow := {"posts": "to", "awaits": "from"}.get(kind(self.main.kind).meets):
                words.append(f"{arrow} {self.main.peer}")
        if self.signals:
            words.append("!" + _peers(self.signals))
        return " ".join(words)


def _peers(steps: list[Step]) -> str:
    return ",".join(str(peer) for step in steps for peer in step.peers)


def _mark(step: Step) -> str:
    """Return the mark of a step that only posts or awaits, or "" for any other step."""
    record = kind(step.kind)
    return "" if record.memory else {"posts": "!", "awaits": "?"}.get(record.meets, "")


def text(calls: Calls, ranks: Iterable[int] | None = None, width: int = 120) -> str:
    """Return the plans of ``calls`` as a picture in plain text.

    Args:
        calls: for each call, the plans of all ranks.
        ranks: the ranks to show; all by default.
        width: the width of a line, in characters.

    Raises:
        ValueError: the plans deadlock, a kind of step is not registered, a step's ``after`` names a later step, calls
            have different numbers of ranks, or there is no plan, or none for a rank in ``ranks``.
    """
    plans: list[Plan] = [plan for each in calls for plan in each]
    shown = sorted({plan.rank for plan in plans} if ranks is None else set(ranks))
    if not plans:
        raise ValueError("there are no plans to draw")
    missing = set(shown) - {plan.rank for plan in plans}
    if missing:
        raise ValueError(f"no rank {min(missing)} in a plan for ranks 0 to {max(plan.rank for plan in plans)}")
    rows = [(rank, stream) for rank in shown for stream in _streams(plans, rank)]
    pieces = any(step.chunk is not None and step.chunk[1] for plan in plans for step in plan.steps)
    grid: defaultdict[int, dict[tuple[int, str], str]] = defaultdict(dict)
    for cell in _cells(Order(calls)):
        if cell.row in rows:
            grid[cell.column][cell.row] = cell.text(pieces)
    names = {(rank, stream): f"rank {rank}  {stream}" for rank, stream in rows}
    margin = max(len(name) for name in names.values())
    blocks = []
    for columns in _lines(grid, width - margin - 3):
        lines: list[str] = []
        for row in rows:
            cells = [grid[column].get(row, "").ljust(size) for column, size in columns]
            if lines and row[1] == _streams(plans, row[0])[0]:
                lines.append("")
            lines.append(f"{names[row].ljust(margin)} | {'  '.join(cells)}".rstrip())
        blocks.append("\n".join(lines))
    return "\n\n\n".join(blocks)


def _streams(plans: list[Plan], rank: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stream for plan in plans if plan.rank == rank for stream in plan.streams))


def _cells(order: Order) -> list[_Cell]:
    """Return the cells of all streams, each in the first column to the right of all cells that it follows."""
    if order.stuck:
        raise ValueError("the plans deadlock, so they have no picture: see verify(calls)")
    cell_of: list[_Cell] = [_Cell((0, ""))] * len(order.where)
    cells: list[_Cell] = []
    for timeline in order.timelines:
        for number in timeline:
            at = order.where[number]
            if number and order.where[number - 1] is at:  # leaving a barrier
                cell_of[number] = cells[-1]
                continue
            if number == timeline[0] or not cells[-1].takes(at.step):
                cells.append(_Cell((at.rank, at.step.stream)))
            cells[-1].add(at.step)
            cell_of[number] = cells[-1]
    behind = dict(pair[::-1] for members in order.timelines for pair in pairwise(members))
    for number in order.sequence:
        cell, leaves = cell_of[number], number > 0 and order.where[number - 1] is order.where[number]
        for earlier in [*order.follows.get(number, ()), behind.get(number)]:
            if earlier is not None and cell_of[earlier] is not cell:  # the cells of one barrier share a column
                cell.column = max(cell.column, cell_of[earlier].column + (0 if leaves else 1))
    return cells


def _lines(grid: Mapping[int, Mapping[tuple[int, str], str]], room: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each line of the picture, its columns with their widths."""
    line: list[tuple[int, int]] = []
    for column in sorted(grid):
        size = max(map(len, grid[column].values()))
        if line and sum(width + 2 for _, width in line) + size > room:
            yield line
            line = []
        line.append((column, size))
    yield line
