"""A plan: the steps of one rank, and how long the memory they touch lives.

A stream runs its steps in the order of the plan. Streams of one rank are ordered by ``Step.after``; ranks meet only in
barriers and in pairs of a step that posts and one that awaits (signal and wait). The same value is executed, verified,
simulated and drawn, so what ships is what was proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from .program import Program, compile_steps
from .step import Step


class Life(Enum):
    """How long a buffer lives, and who may touch it."""

    INPUT = "input"
    """The caller's, filled before the call. Peers read it only where it lies in symmetric memory."""
    OUTPUT = "output"
    """The caller's, filled by the call."""
    CALL = "call"
    """A part of the workspace, in symmetric memory, which peers may touch. The workspace has two halves, which calls
    use in turn and lay out anew each time: so calls k and k+2 share memory, calls k and k+1 do not."""
    SCRATCH = "scratch"
    """This rank's own memory for one call. Peers cannot touch it."""
    PERSISTENT = "persistent"
    """Outlives the call: parameters, optimizer state, activation slots. A call may read what an earlier one wrote."""


@dataclass(frozen=True)
class Plan:
    """The steps of one rank, in an order in which one thread may run them.

    Attributes:
        op: the name of the operation; plans of the same op and world size differ in rank and planner arguments.
        buffers: for each buffer that the steps touch, how long it lives.
    """

    op: str
    rank: int
    world: int
    steps: tuple[Step, ...]
    buffers: Mapping[str, Life] = field(default_factory=dict, hash=False)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What others derive from the plan and keep with it: to hash a whole plan takes longer than to issue it."""
        return {}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first appearance; the first is the caller's."""
        return tuple(dict.fromkeys(step.stream for step in self.steps))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its steps."""
        return frozenset(step.kind for step in self.steps)

    @cached_property
    def channels(self) -> int:
        """How many channels it needs: one more than the highest that a step names, or 0."""
        return 1 + max((step.channel for step in self.steps if step.channel is not None), default=-1)

    @cached_property
    def extents(self) -> dict[str, int]:
        """Units that each buffer of this rank must have for this plan: ``{buffer: units}``."""
        extents: dict[str, int] = {}
        for step in self.steps:
            for region in step.reads + step.writes:
                if region.rank == self.rank:
                    extents[region.buffer] = max(region.stop, extents.get(region.buffer, 0))
        return extents

    @cached_property
    def program(self) -> Program:
        """What an executor needs to issue the plan, made once and kept with the plan."""
        return compile_steps(self.steps)
