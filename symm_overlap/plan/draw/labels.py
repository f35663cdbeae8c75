"""The labels of the boxes of a timeline: written on the box, or above it if the box is too narrow."""

from __future__ import annotations

from dataclasses import dataclass

from ..kinds import kind
from ..step import Step
from ..timeline import Event

INSIDE = 6.0  # width in pixels of a character on a box, at a font size of 11
ABOVE = 4.8  # width in pixels of a character above a box, at a font size of 8


def full(step: Step) -> str:
    """Return the kind of a step, and its chunk or its peers."""
    if step.chunk is not None and kind(step.kind).memory:
        return f"{step.kind} {step.chunk_name()}"
    return f"{step.kind} {_peers(step)}" if step.peers else step.kind


def short(step: Step) -> str:
    """Return a label of few characters: ``!1`` signals rank 1, ``?1`` waits for it, ``1.0`` is chunk 0 of rank 1."""
    record = kind(step.kind)
    if not record.memory and record.meets in ("posts", "awaits"):
        return f"{'!' if record.meets == 'posts' else '?'}{_peers(step)}"
    return step.kind if step.chunk is None else step.chunk_name()


def _peers(step: Step) -> str:
    return ",".join(map(str, step.peers))


def inside(step: Step, width: float) -> str | None:
    """Return the longest label that a box of ``width`` pixels can hold, or None if it is too narrow for any."""
    return next((text for text in (full(step), short(step)) if INSIDE * len(text) + 4 <= width), None)


@dataclass
class Above:
    """A label above one or several narrow boxes. The first box is at ``x``."""

    x: float
    text: str

    @property
    def end(self) -> float:
        """Where the text ends."""
        return self.x + ABOVE * len(self.text) + 4


def above(narrow: list[tuple[float, Event]]) -> list[Above]:
    """Return the labels above the narrow boxes of one row. The boxes are given as (position, event), from left to
    right.

    If the label of an earlier box reaches over a box, that label also names this box. So labels do not overlap.
    """
    labels: list[Above] = []
    last = ""
    for x, event in narrow:
        step = event.at.step
        text = short(step) if short(step)[0] in "!?" else full(step)
        if not labels or x >= labels[-1].end:
            labels.append(Above(x, text))
        elif text[0] in "!?" and text[0] == last[:1]:
            labels[-1].text += f",{text[1:]}"
        else:
            labels[-1].text += f" {text}"
        last = text
    return labels
