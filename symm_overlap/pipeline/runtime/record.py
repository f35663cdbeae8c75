"""Record when each action of a step ran, to draw a timeline or to measure the costs of actions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ...plan import Step, Table
from ..action import Action
from ..measured import TimedAction


class Record:
    """Records when actions start and end. Set ``PipelineRuntime.record`` to a `Record`, and to None to stop.

    On a GPU, the host waits for each action, so that the time of the work is measured and not the time of its launch.
    Sends then no longer overlap with compute.

    Attributes:
        ran: the actions since the last `clear`, in order. Times are seconds of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.ran: list[TimedAction] = []

    def clear(self) -> list[TimedAction]:
        """Return the recorded actions, and remove them from the record."""
        noted, self.ran = self.ran, []
        return noted

    def timed(self, table: Table, device: torch.device) -> Table:
        """Return the table with functions that also record their times."""
        wait = None if device == torch.device("cpu") else partial(torch.accelerator.synchronize, device)
        return {kind: self._timed(function, wait) for kind, function in table.items()}

    def _timed(self, function: Callable[[Step], object], wait: Callable[[], object] | None) -> Callable[[Step], object]:
        def run(step: Step) -> object:
            start = time.perf_counter()
            result = function(step)
            if wait is not None:
                wait()
            self.ran.append(TimedAction(_action(step), start, time.perf_counter()))
            return result

        return run


def _action(step: Step) -> Action:
    """Return the action of a step.

    The label is not used if the step has a chunk, because the label of a receive is that of its send.
    """
    return Action.parse(step.label) if step.chunk is None else Action(step.chunk[0], step.kind, step.chunk[1])
