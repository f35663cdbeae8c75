"""Check that every action is there exactly once, and on its own rank after what it needs there."""

from __future__ import annotations

from collections.abc import Iterator

from ..action import (
    AWAITED_SENDS,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BACKWARDS,
    FORWARD,
    FULL_BACKWARD,
    KINDS,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    RECVS,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WAIT_REDUCE_GRAD,
    WHOLE_STAGE,
    Action,
)
from ..schedule import Schedule
from .problem import Index, Problem

_AWAITED = AWAITED_SENDS | {WAIT_REDUCE_GRAD: REDUCE_GRAD}
MOST_MISSING = 1000
"""The most missing actions that are reported. One mistyped number can make millions of microbatches."""

_KINDS = KINDS - {OVERLAP_F_B}  # a compound is replaced by its parts


def misplaced(index: Index) -> Iterator[Problem]:
    """Find actions of an unknown kind, of a stage on another rank, or on a microbatch that their stage does not run."""
    schedule = index.schedule
    runs = [schedule.microbatches_of(stage) for stage in range(schedule.stages)]
    for places in index.places:
        for place in places:
            stage, microbatch = place.action.stage, place.action.microbatch
            if place.action.kind not in _KINDS:
                yield Problem("misplaced", (place,), "there is no such kind of action")
            elif not 0 <= stage < schedule.stages:
                yield Problem("misplaced", (place,), f"there are stages 0 to {schedule.stages - 1}")
            elif schedule.placement[stage] != place.rank:
                yield Problem("misplaced", (place,), f"stage {stage} is on rank {schedule.placement[stage]}")
            elif place.action.kind not in WHOLE_STAGE and microbatch not in runs[stage]:
                text = f"stage {stage} runs microbatches {runs[stage].start} to {runs[stage].stop - 1}"
                yield Problem("misplaced", (place,), text)


def wrong_counts(index: Index) -> Iterator[Problem]:
    """Find actions that are there more than once, and computing actions that are missing.

    A schedule without any backward is treated as forwards only. A backward is one B, or one I and one W.
    """
    for action, places in index.of.items():
        # A stage may be gathered, and freed, more than once.
        if len(places) > 1 and action.kind not in ("UNSHARD", "RESHARD"):
            yield Problem("duplicated", tuple(places), f"{action} is there {len(places)} times")
    for number, problem in enumerate(_missing(index)):
        if number == MOST_MISSING:
            text = f"more actions: the schedule has {index.schedule.microbatches} microbatches"
            yield Problem("missing", (), f"{text}. If that is wrong, an action has a wrong number")
            break
        yield problem


def _missing(index: Index) -> Iterator[Problem]:
    """Find forwards that are missing, and backwards that are missing or have too many parts."""
    backward = not index.kinds.isdisjoint((*BACKWARDS, BACKWARD_WEIGHT))
    for stage in range(index.schedule.stages):
        for microbatch in index.schedule.microbatches_of(stage):
            if Action(stage, FORWARD, microbatch) not in index.of:
                yield Problem("missing", (), f"no {Action(stage, FORWARD, microbatch)}")
            if backward:
                yield from _wrong_backward(index, stage, microbatch)


def _wrong_backward(index: Index, stage: int, microbatch: int) -> Iterator[Problem]:
    full, of_input, of_weight = (
        Action(stage, kind, microbatch) for kind in (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    found = [place for part in (full, of_input, of_weight) for place in index.of.get(part, ())[:1]]
    kinds = [place.action.kind for place in found]
    if not kinds:
        yield Problem("missing", (), f"neither {full} nor {of_input} and {of_weight}")
    elif FULL_BACKWARD in kinds and len(kinds) > 1:
        yield Problem("duplicated", tuple(found), f"{full} computes both gradients, so no other may compute one")
    elif kinds == [BACKWARD_INPUT]:
        yield Problem("missing", tuple(found), f"no {of_weight}")
    elif kinds == [BACKWARD_WEIGHT]:
        yield Problem("missing", tuple(found), f"no {of_input}")


def wrong_order(index: Index, communicates: bool) -> Iterator[Problem]:
    """Find actions that do not have what they need of their own rank in an earlier cell."""
    for places in index.places:
        for place in places:
            for needed in _needed(index.schedule, place.action, communicates):
                first = [index.first(action) for action in needed]
                found = [at for at in first if at is not None]
                if not found:
                    yield Problem("missing", (place,), f"it needs {' or '.join(map(str, needed))} before it")
                elif all(at.cell >= place.cell for at in found):
                    yield Problem("order", (place, found[0]), "the first one needs the second one in an earlier cell")


def _needed(schedule: Schedule, action: Action, communicates: bool) -> Iterator[tuple[Action, ...]]:
    """Yield what an action needs of its own rank: one action of each tuple."""
    stage, kind, microbatch, _ = action
    if kind == FORWARD:
        yield from _inputs(schedule, schedule.previous_stage(stage), action, (FORWARD,), RECV_F, communicates)
    elif kind in BACKWARDS:
        yield (Action(stage, FORWARD, microbatch),)
        yield from _inputs(schedule, schedule.next_stage(stage), action, BACKWARDS, RECV_B, communicates)
    elif kind == BACKWARD_WEIGHT:
        yield (Action(stage, BACKWARD_INPUT, microbatch),)
    elif kind == SEND_F:
        yield (Action(stage, FORWARD, microbatch),)
    elif kind == SEND_B:
        yield tuple(Action(stage, made, microbatch) for made in BACKWARDS)
    elif kind in _AWAITED:
        yield (Action(stage, _AWAITED[kind], microbatch),)


def _inputs(
    schedule: Schedule,
    neighbour: int | None,
    action: Action,
    made: tuple[str, ...],
    recv: str,
    communicates: bool,
) -> Iterator[tuple[Action, ...]]:
    if neighbour is None:
        return
    if schedule.placement[neighbour] == schedule.placement[action.stage]:
        yield tuple(Action(neighbour, kind, action.microbatch) for kind in made)
    elif communicates:
        yield (Action(action.stage, recv, action.microbatch),)


def consumed(index: Index) -> Iterator[Problem]:
    """Find receives after which no action of their rank uses the received data."""
    for places in index.places:
        for place in places:
            stage, kind, microbatch, _ = place.action
            if kind not in RECVS:
                continue
            users = (FORWARD,) if kind == RECV_F else BACKWARDS
            at = [index.first(Action(stage, user, microbatch)) for user in users]
            if not any(user is not None and user.cell > place.cell for user in at):
                yield Problem("order", (place,), "no later action uses what it receives")
