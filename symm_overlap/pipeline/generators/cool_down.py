"""The end of a schedule with split backwards: which gradients come first when a rank has no forwards left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ..schedule import Row


def gradients_first(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows in another order behind the last forward of each: the next I where it can run, and else the next W.

    All actions take one step. A rank keeps no more activations than before: there are no forwards behind this place,
    and each W still frees one. ``rows`` have no empty cells, and are of one pipeline.
    """
    last_stage = max(action.stage for row in rows for action in row if action)
    parts = [tuple(map(deque, _parts(row))) for row in rows]
    heads, inputs, weights = ([part[index] for part in parts] for index in range(3))
    made: dict[tuple[str, int, int | None], int] = {}  # (F or I, stage, microbatch): the step in which it was made
    ordered: list[list[Action]] = [[] for _ in rows]

    def ready(action: Action, step: int) -> bool:
        """Whether what the action needs was made in an earlier step; the forward of its own stage always was."""
        kind, stage = action.kind, action.stage
        if kind == FORWARD:
            need = (FORWARD, stage - 1) if stage else None
        elif kind == BACKWARD_INPUT:
            need = (BACKWARD_INPUT, stage + 1) if stage < last_stage else None
        else:
            need = (BACKWARD_INPUT, stage)
        return need is None or made.get((*need, action.microbatch), step) < step

    step = 0
    running = list(range(len(rows)))
    while running:
        for rank in running:
            for queue in (heads[rank],) if heads[rank] else (inputs[rank], weights[rank]):
                if queue and ready(queue[0], step):
                    action = queue.popleft()
                    ordered[rank].append(action)
                    made[action.kind, action.stage, action.microbatch] = step
                    break
        running = [rank for rank in running if heads[rank] or inputs[rank] or weights[rank]]
        step += 1
    return tuple(map(tuple, ordered))


def _parts(row: Row) -> tuple[list[Action], list[Action], list[Action]]:
    """A row up to its last forward; the I behind it; the W behind it."""
    actions = [action for action in row if action is not None]
    end = 1 + max(index for index, action in enumerate(actions) if action.kind == FORWARD)
    left = actions[end:]
    return (
        actions[:end],
        [action for action in left if action.kind == BACKWARD_INPUT],
        [action for action in left if action.kind == BACKWARD_WEIGHT],
    )
