"""What is written on the boxes of a timeline, or above those that are too narrow to hold it."""

from __future__ import annotations

from dataclasses import dataclass

from ..kinds import kind
from ..step import Step
from ..timeline import Event

INSIDE = 6.0  # pixels for a character on a box, at 11 pixels' height
ABOVE = 4.8  # pixels for a character above a box, at 8 pixels' height


def full(step: Step) -> str:
    """The kind of a step, and its chunk or the ranks that it meets."""
    if step.chunk is not None and kind(step.kind).memory:
        return f"{step.kind} {step.chunk[0]}.{step.chunk[1]}"
    return f"{step.kind} {_peers(step)}" if step.peers else step.kind


def short(step: Step) -> str:
    """The same in a few characters: ``!1`` signals rank 1, ``?1`` waits for it, ``1.0`` is chunk 0 of rank 1."""
    record = kind(step.kind)
    if not record.memory and record.meets in ("posts", "awaits"):
        return f"{'!' if record.meets == 'posts' else '?'}{_peers(step)}"
    return step.kind if step.chunk is None else f"{step.chunk[0]}.{step.chunk[1]}"


def _peers(step: Step) -> str:
    return ",".join(map(str, step.peers))


def inside(step: Step, width: float) -> str | None:
    """The longest label that a box of ``width`` pixels can hold; None if it is too narrow for any."""
    return next((text for text in (full(step), short(step)) if INSIDE * len(text) + 4 <= width), None)


@dataclass
class Above:
    """A label above one or several narrow boxes, the first of which is at ``x``."""

    x: float
    text: str

    @property
    def end(self) -> float:
        """Where the text ends."""
        return self.x + ABOVE * len(self.text) + 4


def above(narrow: list[tuple[float, Event]]) -> list[Above]:
    """The labels above the narrow boxes of one row, given with their positions, from left to right.

    A box under the label of an earlier one is named by the same label, so labels do not overlap.
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
