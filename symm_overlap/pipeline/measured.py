"""From the times of real steps to costs, so that the simulator's prediction can be held against a real step."""

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
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
)
from .costs import PipelineCosts
from .schedule import Schedule
from .verify.links import RECVS, SENDS, counterpart


class Ran(NamedTuple):
    """An action that ran on a rank, and when, on a clock that all ranks share. Of a compound, each part ran."""

    action: Action
    start: float
    end: float


Step = Sequence[Sequence[Ran]]
"""For each rank of a pipeline what it ran in one step, in order."""


def span(step: Step) -> float:
    """How long a step took, from the start of the first action on any rank to the end of the last."""
    ran = [each for rank in step for each in rank]
    return max(each.end for each in ran) - min(each.start for each in ran)


def measured_costs(schedule: Schedule, steps: Iterable[Step]) -> PipelineCosts:
    """What the actions of some steps cost: for each kind and stage the median, in the unit of the times.

    A send takes what it took on its rank. From then on it takes ``latency`` until the receiver has the message, where
    that one was waiting for it.

    Raises:
        ValueError: there is no forward of some stage among them.
    """
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    latencies: list[float] = []
    for step in steps:
        for ran in (each for rank in step for each in rank):
            kind, stage = ran.action.kind, ran.action.stage
            # A gradient is as large as the activation that the stage before sends.
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
    """How long messages took to those who waited for them, from the end of their sends."""
    sent = {ran.action: ran.end for rank in step for ran in rank if ran.action.kind in SENDS}
    for ran in (each for rank in step for each in rank if each.action.kind in RECVS):
        send = counterpart(schedule, ran.action)
        if send in sent and ran.start < sent[send]:
            yield max(0.0, ran.end - sent[send])
