"""Build the row of a rank that has two stages, and count the microbatches of each kind of action."""

from __future__ import annotations

from collections import Counter, deque

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, compound_of
from ..schedule import Row


class RowOfTwo:
    """The row of one rank, built action by action.

    Chunk 0 is the stage that a microbatch enters first, and chunk 1 is the other stage. Each action gets the next
    microbatch for its kind and chunk.

    Args:
        stages: the stages that are chunk 0 and chunk 1.
        first: for each chunk, its first microbatch.
    """

    def __init__(self, stages: tuple[int, int], first: tuple[int, int] = (0, 0)) -> None:
        self.row: list[Action | None] = []
        self._stages, self._first = stages, first
        self._counts: Counter[tuple[str, int]] = Counter()
        self._pending: deque[Action] = deque()  # the W that were not appended yet, although their I was

    def count(self, kind: str, chunk: int) -> int:
        """Return the number of actions of this kind on this chunk. A full backward counts as an I and as a W."""
        return self._counts[kind, chunk]

    def add(self, *actions: str) -> None:
        """Append actions, such as "F0" for the next forward of chunk 0."""
        self.row += [self._next(action[0], int(action[1])) for action in actions]

    def overlap(self, forward: int, backward: int) -> None:
        """Append a compound: the next forward of one chunk and the next full backward of another."""
        self.row.append(compound_of(self._next(FORWARD, forward), self._next(FULL_BACKWARD, backward)))

    def add_weight(self) -> None:
        """Append the oldest pending W of either chunk, if there is one. A W is pending once its I was appended."""
        if self._pending:
            self.row.append(self._pending.popleft())

    def finish(self, microbatches: int) -> Row:
        """Return the row, with an empty cell in place of each action on a microbatch that does not exist."""
        return tuple(
            action if action is None or action.parts or (action.microbatch or 0) < microbatches else None
            for action in self.row
        )

    def _next(self, kind: str, chunk: int) -> Action:
        """Count and return the next action of a kind on a chunk."""
        counted = (BACKWARD_INPUT, BACKWARD_WEIGHT) if kind == FULL_BACKWARD else (kind,)
        stage, microbatch = self._stages[chunk], self._first[chunk] + self._counts[counted[0], chunk]
        for each in counted:
            self._counts[each, chunk] += 1
        if kind == BACKWARD_INPUT:
            self._pending.append(Action(stage, BACKWARD_WEIGHT, microbatch))
        return Action(stage, kind, microbatch)
