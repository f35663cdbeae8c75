"""The end of a schedule with split backwards: the order of the gradients when a rank has no forwards left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ..schedule import Row


def gradients_first(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Reorder each row after its last forward: run the next I if it can run, and otherwise the next W.

    The new order assumes that all actions take one step. A rank keeps no more activations than before, because there
    are no forwards after this place, and each W still frees one activation.

    Args:
        rows: the rows of one pipeline, without empty cells.
    """
    last_stage = max(action.stage for row in rows for action in row if action)
    parts = [tuple(map(deque, _parts(row))) for row in rows]
    heads, inputs, weights = ([part[index] for part in parts] for index in range(3))
    made: dict[tuple[str, int, int | None], int] = {}  # (kind, stage, microbatch): the step at which it ran
    ordered: list[list[Action]] = [[] for _ in rows]

    def ready(action: Action, step: int) -> bool:
        """True if the action that this one needs ran at an earlier step. The forward of its own stage always did."""
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
    """Return the row up to its last forward, the I after it, and the W after it."""
    actions = [action for action in row if action is not None]
    end = 1 + max(index for index, action in enumerate(actions) if action.kind == FORWARD)
    left = actions[end:]
    return (
        actions[:end],
        [action for action in left if action.kind == BACKWARD_INPUT],
        [action for action in left if action.kind == BACKWARD_WEIGHT],
    )
