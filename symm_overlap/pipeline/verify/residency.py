"""Check which parameters are unsharded at each action, and count how many activations are kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ..action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BACKWARDS,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    Action,
)
from .problem import Index, Place, Problem

_COMPUTE = frozenset({FORWARD, BACKWARD_WEIGHT, *BACKWARDS})


def sharded(index: Index) -> Iterator[Problem]:
    """Find compute on parameters that are not unsharded, and parameters that are gathered or freed twice or needlessly.

    A schedule without any UNSHARD is not checked, except that it must not contain a RESHARD either.
    """
    if UNSHARD not in index.kinds:
        for place in chain.from_iterable(index.places):
            if place.action.kind == RESHARD:
                yield Problem("resharded", (place,), "no stage is ever unsharded")
        return
    whole: dict[int, Place] = {}
    unused: dict[int, Place] = {}  # those of `whole` that no compute has used so far
    freed: dict[int, Place] = {}
    for place in chain.from_iterable(index.places):
        stage, kind = place.action.stage, place.action.kind
        if kind == UNSHARD:
            if stage in whole:
                yield Problem("resharded", (whole[stage], place), f"stage {stage} is unsharded already")
            whole[stage] = unused[stage] = place
        elif kind == RESHARD:
            if stage not in whole:
                yield Problem("resharded", (place,), f"stage {stage} is not unsharded")
            elif stage in unused:
                yield Problem("resharded", (unused.pop(stage), place), f"stage {stage} is unsharded for nothing")
            whole.pop(stage, None)
            freed[stage] = place
        elif kind in _COMPUTE:
            unused.pop(stage, None)
            if stage not in whole and stage in freed:
                yield Problem("sharded", (place, freed[stage]), f"stage {stage} computes after it was resharded")
            elif stage not in whole:
                yield Problem("sharded", (place,), f"stage {stage} computes before it is unsharded")
    for stage, place in unused.items():
        yield Problem("resharded", (place,), f"stage {stage} is unsharded for nothing")


def unreduced(index: Index) -> Iterator[Problem]:
    """Find stages whose gradients are reduced too early or not at all, or that have no gradients.

    Without any REDUCE_GRAD, nothing is checked.
    """
    if REDUCE_GRAD not in index.kinds:
        return
    for places in index.places:
        last: dict[int, Place] = {}
        for place in places:
            if place.action.kind in (FULL_BACKWARD, BACKWARD_WEIGHT):
                last[place.action.stage] = place
        for stage, backward in last.items():
            reduced = index.first(Action(stage, REDUCE_GRAD))
            if reduced is None:
                yield Problem(
                    "unreduced", (backward,), f"no {stage}REDUCE_GRAD after the last backward of stage {stage}"
                )
            elif reduced.cell <= backward.cell:
                text = f"stage {stage} is reduced before its last backward"
                yield Problem("unreduced", (reduced, backward), text)
        for place in places:
            if place.action.kind == REDUCE_GRAD and place.action.stage not in last:
                yield Problem("unreduced", (place,), f"stage {place.action.stage} has no backward, hence no gradients")


def peak_activations(index: Index) -> tuple[int, ...]:
    """Return for each rank the most activations that it keeps at a time. Each (stage, microbatch) pair counts once.

    They are kept from the forward to the full backward, or to the weight gradient if the backward is split.
    """
    split = {action[::2] for action in index.of if action.kind == BACKWARD_INPUT}
    peaks = []
    for places in index.places:
        now = peak = 0
        for _, _, (stage, kind, microbatch, _) in places:
            if kind == FORWARD:
                now += 1
                peak = max(peak, now)
            elif kind == BACKWARD_WEIGHT or (kind == FULL_BACKWARD and (stage, microbatch) not in split):
                now -= 1
        peaks.append(peak)
    return tuple(peaks)


def peak_unsharded(index: Index) -> tuple[int, ...]:
    """Return for each rank the most stages whose parameters are unsharded at a time.

    Without any UNSHARD, all parameters are always unsharded.
    """
    if UNSHARD not in index.kinds:
        return tuple(map(len, index.schedule.stages_of_ranks))
    peaks = []
    for places in index.places:
        whole: set[int] = set()
        peak = 0
        for place in places:
            if place.action.kind == UNSHARD:
                whole.add(place.action.stage)
                peak = max(peak, len(whole))
            elif place.action.kind == RESHARD:
                whole.discard(place.action.stage)
        peaks.append(peak)
    return tuple(peaks)
