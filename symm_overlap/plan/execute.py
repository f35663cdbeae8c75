"""Execute a plan: issue its steps, through a table {kind -> function}, on real streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .plan import Plan
from .program import Item, Program
from .step import Step

Table = Mapping[str, Callable[[Step], object]]
"""For each kind, the function that runs a step. Steps of a kind that is not in the table still order other steps."""


class Streams(Protocol):
    """An object that runs programs: streams of any kind, with events between them."""

    def run(self, program: Program, table: Table) -> None:
        """Run every step: the steps of each stream in order, and no step before the events that it waits for."""


def execute(plan: Plan, table: Table, streams: Streams) -> None:
    """Run this rank's plan.

    Args:
        plan: one rank's plan. Its program is compiled once and kept with the plan.
        table: ``{kind: function(step)}``.
        streams: where the steps run: `InlineStreams`, `ThreadStreams`, or CUDA streams.

    Raises:
        Any error that a function of the table raises, with the step that raised it added to the message.
    """
    streams.run(plan.program, table)


def at_step(error: BaseException, item: Item) -> BaseException:
    """Return ``error`` with the text of the step that raised it. Its type is kept, so callers can still catch it."""
    text = f"in the plan's step: {item.step}"
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    return error
