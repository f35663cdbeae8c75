"""A plan made ready to issue: the steps of each stream, and the events that order streams of one rank.

Nothing is looked up while a plan is issued. A step that another stream must follow sets one event, whoever waits for
it.
"""

from __future__ import annotations

from typing import NamedTuple

from .step import Step


class Item(NamedTuple):
    """One step as an executor sees it: wait for ``waits``, run ``step``, set ``event``."""

    kind: str
    step: Step
    waits: tuple[int, ...]
    event: int | None


class Program(NamedTuple):
    """``items`` in issue order; ``streams``, the same by stream, the caller's first; ``events``, how many."""

    items: tuple[Item, ...]
    streams: dict[str, tuple[Item, ...]]
    events: int


def compile_steps(steps: tuple[Step, ...]) -> Program:
    """The program of a plan's steps."""
    awaited = sorted({earlier for step in steps for earlier in step.after})
    events = {index: event for event, index in enumerate(awaited)}
    items = tuple(
        Item(step.kind, step, tuple(events[earlier] for earlier in step.after), events.get(index))
        for index, step in enumerate(steps)
    )
    names = dict.fromkeys(step.stream for step in steps)
    streams = {name: tuple(item for item in items if item.step.stream == name) for name in names}
    return Program(items, streams, len(events))
