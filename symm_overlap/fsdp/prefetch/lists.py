"""Convert how far each layer looks ahead into the prefetch lists that torch is given.

A layer is *demanded* where it would be gathered if nothing were gathered ahead. When a layer starts for the first time
in a pass, it can gather ahead the layers that are demanded next. A module that runs twice has one list, for its first
start. A layer that did not run in the recorded step has no list, so torch's default applies to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .issue_order import Machine, Prefetch
from .kinds import GATHER
from .policy import Bytes, Depth, bytes_of
from .trace import PRE_BACKWARD, PRE_FORWARD, Trace


@dataclass(frozen=True)
class Start:
    """A point where a layer can gather others ahead.

    Attributes:
        forward: True in its forward, False in its backward.
        next_layers: the other layers that are demanded later in this pass, each once, in order.
    """

    layer: int
    forward: bool
    next_layers: tuple[int, ...]


def starts_of(trace: Trace) -> list[Start]:
    """Return the points where layers can gather others ahead, in order."""
    demands = _demands(trace)
    found: dict[tuple[int, bool], Start] = {}
    for place, call in enumerate(trace.calls):
        forward = call.what == PRE_FORWARD
        key = call.layer, forward
        if call.what in (PRE_FORWARD, PRE_BACKWARD) and key not in found and trace.layers[call.layer].has_parameters:
            later = [layer for at, layer, of_forward in demands if at > place and of_forward == forward]
            next_layers = tuple(layer for layer in dict.fromkeys(later) if layer != call.layer)
            found[key] = Start(call.layer, forward, next_layers)
    return list(found.values())


def _demands(trace: Trace) -> list[tuple[int, int, bool]]:
    """Return (position among the calls, layer, whether in a forward) of every gather if nothing is gathered ahead."""
    alone = tuple((layer,) for layer in range(len(trace.layers)))
    machine = Machine(trace.layers, Prefetch((), alone), 1)
    demands = []
    for place, call in enumerate(trace.calls):
        before = len(machine.issued)
        machine.call(call)
        gathered = [issue.layer for issue in machine.issued[before:] if issue.what == GATHER]
        demands += [(place, layer, not machine.in_backward) for layer in gathered]
    return demands


def lists(trace: Trace, starts: Sequence[Start], counts: Sequence[int | None]) -> Prefetch:
    """Return the prefetch lists with which each start gathers ``count`` layers ahead. None keeps torch's default there.

    A backward start that gathers nothing ahead lists itself, since an empty list would mean torch's default.
    """
    forward: list[tuple[int, ...]] = [()] * len(trace.layers)
    backward: list[tuple[int, ...]] = [()] * len(trace.layers)
    for start, count in zip(starts, counts, strict=True):
        if count is None:
            continue
        ahead = start.next_layers[:count]
        if start.forward:
            forward[start.layer] = ahead
        else:
            backward[start.layer] = ahead or (start.layer,)
    return Prefetch(tuple(forward), tuple(backward))


def counts_of(trace: Trace, starts: Sequence[Start], policy: Depth | Bytes) -> list[int]:
    """Return how many layers each start gathers ahead under a policy."""
    if isinstance(policy, Depth):
        return [min(policy.layers, len(start.next_layers)) for start in starts]
    return [_fitting(start, bytes_of(policy.budget), lambda layer: trace.layers[layer].nbytes) for start in starts]


def _fitting(start: Start, budget: int, nbytes: Callable[[int], int]) -> int:
    taken = 0
    for count, layer in enumerate(start.next_layers):
        taken += nbytes(layer)
        if taken > budget:
            return count
    return len(start.next_layers)
