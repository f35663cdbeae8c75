"""Verify a schedule: prove that it trains the model, terminates, and computes only on data that is available.

A schedule without any backward evaluates the model, and is checked for that.

- Every microbatch has every action exactly once on each stage, on the rank of the stage.
- Each action comes after the actions of its own rank that it needs. What it needs from another rank, it receives.
- Every send has its receive, and both ends of each link have them in the same order.
- No rank waits forever. A deadlock is explained as the ring of actions that wait for each other.
- Compute has its parameters unsharded, and gradients are reduced after the last backward.

A schedule that only computes, without sends and receives, is checked for everything else. The time is proportional to
the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...plan.verdict import Verdict
from ..action import BACKWARD_WEIGHT, BACKWARDS, MESSAGES
from ..schedule import Schedule, require_equal_shares
from .counts import consumed, misplaced, wrong_counts, wrong_order
from .deadlock import TRANSPORTS, deadlocks
from .links import unpaired
from .problem import Index, Place, Problem
from .residency import peak_activations, peak_unsharded, sharded, unreduced


@dataclass(frozen=True, slots=True)
class Report(Verdict):
    """What `verify` found.

    Attributes:
        trains: whether the schedule has backwards. Without any, it only evaluates the model.
        actions: the number of actions; the parts of compounds count separately.
        problems: what is wrong; empty if ``ok``.
        peak_activations: for each rank, the most (stage, microbatch) pairs whose activations it keeps at a time. They
            are kept from the forward to the backward, or to the weight gradient if the backward is split.
        peak_unsharded: for each rank, the most stages whose parameters are unsharded at a time.
    """

    trains: bool
    actions: int
    problems: tuple[Problem, ...]
    peak_activations: tuple[int, ...]
    peak_unsharded: tuple[int, ...]

    def __str__(self) -> str:
        if self.ok:
            return (
                f"{self.actions} actions{'' if self.trains else ', no backwards'}: each once and in order, "
                "no deadlock; at most "
                f"{max(self.peak_activations, default=0)} activations and {max(self.peak_unsharded, default=0)} "
                "unsharded stages on a rank"
            )
        return self.listed()


def verify(schedule: Schedule, *, transport: str = "rendezvous") -> Report:
    """Check a schedule of compute, or a schedule with all its sends and receives.

    Args:
        transport: how sends and receives wait. "rendezvous": each blocks its rank until the other side has arrived.
            "batched": adjacent ones start together. "queued": none blocks, but all messages between two ranks
            pass through one queue in order. "buffered": a send never blocks. A schedule without deadlock under
            "rendezvous" has none under the others.

    Returns:
        The problems, if any, and peaks. ``report.ok`` is True if there are none.

    Raises:
        ValueError: there is no such transport, or pipelines cannot share the stages and the microbatches equally.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}: it must be one of {', '.join(map(repr, TRANSPORTS))}")
    require_equal_shares(schedule)
    index = Index(schedule)
    problems = tuple(_problems(index, transport))
    trains = not index.kinds.isdisjoint((*BACKWARDS, BACKWARD_WEIGHT))
    return Report(trains, sum(map(len, index.places)), problems, peak_activations(index), peak_unsharded(index))


def _problems(index: Index, transport: str) -> Iterator[Problem]:
    elsewhere = list(misplaced(index))
    yield from elsewhere
    if elsewhere:  # the other checks look up the neighbours of a stage
        return
    communicates = not index.kinds.isdisjoint(MESSAGES)
    yield from wrong_counts(index)
    yield from wrong_order(index, communicates)
    yield from consumed(index)
    yield from unpaired(index)
    yield from deadlocks(index, transport, communicates)
    yield from sharded(index)
    yield from unreduced(index)


__all__ = ["TRANSPORTS", "Place", "Problem", "Report", "verify"]
