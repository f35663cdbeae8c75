"""Compute costs from the times of real steps, so that the simulator's prediction can be compared with a real step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from .action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECVS,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    SENDS,
    UNSHARD,
    Action,
)
from .schedule import Schedule
from .simulation.costs import PipelineCosts
from .verify.links import counterpart


class TimedAction(NamedTuple):
    """An action that ran on a rank, and its start and end on a clock that all ranks share.

    A compound is recorded as its parts, each with its own times.
    """

    action: Action
    start: float
    end: float


Step = Sequence[Sequence[TimedAction]]
"""For each rank of a pipeline, the actions that it ran in one step, in order."""


def span(step: Step) -> float:
    """Return how long a step took, from the start of the first action on any rank to the end of the last.

    Raises:
        ValueError: the step has no actions.
    """
    ran = [each for rank in step for each in rank]
    if not ran:
        raise ValueError("the step has no actions, so it has no duration")
    return max(each.end for each in ran) - min(each.start for each in ran)


def measured_costs(schedule: Schedule, steps: Iterable[Step]) -> PipelineCosts:
    """Return the costs of the actions of some steps: for each kind and stage the median, in the unit of the times.

    The cost of a message is the time that its send took on the sender. ``latency`` is the time from the end of the send
    until the receiver has the message. Only receives that were already waiting when the send ended count for it.

    Args:
        schedule: the schedule that was run, with its sends and receives.
        steps: the measured steps.

    Raises:
        ValueError: the steps contain no forward of some stage.
    """
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    latencies: list[float] = []
    for step in steps:
        for ran in (each for rank in step for each in rank):
            kind, stage = ran.action.kind, ran.action.stage
            # A gradient is as large as the activation that the previous stage sends.
            key = (SEND_F, stage - 1) if kind == SEND_B else (kind, stage)
            taken[key].append(ran.end - ran.start)
        latencies += _latencies(schedule, step)
    stages = range(schedule.stages)
    missing = [stage for stage in stages if not taken[FORWARD, stage]]
    if missing:
        raise ValueError(f"no forward of stage {missing[0]} was measured")

    def each(kind: str) -> list[float]:
        return [median(taken[kind, stage] or [0.0]) for stage in stages]

    parts = zip(each(BACKWARD_INPUT), each(BACKWARD_WEIGHT), strict=True)
    return PipelineCosts(
        forward=each(FORWARD),
        input_grad=each(BACKWARD_INPUT),
        weight_grad=each(BACKWARD_WEIGHT),
        full_backward=[median(taken[FULL_BACKWARD, stage] or [sum(both)]) for stage, both in enumerate(parts)],
        message=each(SEND_F),
        latency=median(latencies or [0.0]),
        unshard=each(UNSHARD),
        reduce_grad=each(REDUCE_GRAD),
    )


def _latencies(schedule: Schedule, step: Step) -> Iterator[float]:
    """Yield, for each message whose receiver was already waiting, the time from the end of its send to its receipt."""
    sent = {ran.action: ran.end for rank in step for ran in rank if ran.action.kind in SENDS}
    for ran in (each for rank in step for each in rank if each.action.kind in RECVS):
        send = counterpart(schedule, ran.action)
        if send in sent and ran.start < sent[send]:
            yield max(0.0, ran.end - sent[send])
