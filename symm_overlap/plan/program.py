"""A plan that is ready to be issued: the steps of each stream, and the events that order the streams of one rank.

Everything is resolved beforehand, so issuing a plan looks nothing up. A step that steps of other streams must follow
sets one event, however many steps wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

from .step import Step


class Item(NamedTuple):
    """One step as an executor runs it: wait for the events ``waits``, run ``step``, then set ``event`` unless None."""

    kind: str
    step: Step
    waits: tuple[int, ...]
    event: int | None


class Program(NamedTuple):
    """A plan in the form in which it is issued.

    Attributes:
        items: all steps in the order in which they are issued.
        streams: the same items grouped by stream; the caller's stream comes first.
        events: the number of events.
    """

    items: tuple[Item, ...]
    streams: dict[str, tuple[Item, ...]]
    events: int


def compile_steps(steps: tuple[Step, ...]) -> Program:
    """Return the program for a plan's steps."""
    awaited = sorted({earlier for step in steps for earlier in step.after})
    events = {index: event for event, index in enumerate(awaited)}
    items = tuple(
        Item(step.kind, step, tuple(events[earlier] for earlier in step.after), events.get(index))
        for index, step in enumerate(steps)
    )
    names = dict.fromkeys(step.stream for step in steps)
    streams = {name: tuple(item for item in items if item.step.stream == name) for name in names}
    return Program(items, streams, len(events))
