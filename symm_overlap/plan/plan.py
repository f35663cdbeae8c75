"""A plan: the steps of one rank, and how long each buffer that they touch lives.

A stream runs its steps in the order of the plan. ``Step.after`` orders steps on different streams of one rank. Ranks
synchronise only at barriers and through pairs of steps: one step posts (a signal) and a step of another rank awaits it
(a wait). The same plan object is verified, simulated, drawn and executed, so the plan that runs is the one that was
proven.
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
    """Owned by the caller, who has filled it before the call. Peers read it only if it is in symmetric memory."""
    OUTPUT = "output"
    """Owned by the caller and filled by the call."""
    CALL = "call"
    """A part of the workspace, which is in symmetric memory, so peers may read and write it. The workspace has two
    halves. Calls use them in turn, and each call lays out its half anew. So calls k and k+2 share memory, and calls k
    and k+1 do not.
    """
    SCRATCH = "scratch"
    """This rank's own memory for one call. Peers cannot touch it."""
    PERSISTENT = "persistent"
    """Outlives the call: parameters, optimizer state, activation slots. A call may read what an earlier call wrote."""


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
        """A cache for values that other modules derive from the plan.

        They are kept here because hashing a whole plan, to look them up elsewhere, takes longer than issuing it.
        """
        return {}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first appearance; the first is the caller's."""
        return tuple(dict.fromkeys(step.stream for step in self.steps))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of the plan's steps."""
        return frozenset(step.kind for step in self.steps)

    @cached_property
    def channels(self) -> int:
        """How many channels the plan needs: one more than the highest channel that a step names, or 0 if none does."""
        return 1 + max((step.channel for step in self.steps if step.channel is not None), default=-1)

    @cached_property
    def extents(self) -> dict[str, int]:
        """How many units each buffer of this rank must have for this plan: ``{buffer: units}``."""
        extents: dict[str, int] = {}
        for step in self.steps:
            for region in step.reads + step.writes:
                if region.rank == self.rank:
                    extents[region.buffer] = max(region.stop, extents.get(region.buffer, 0))
        return extents

    @cached_property
    def program(self) -> Program:
        """The program that an executor issues. It is compiled once and kept with the plan."""
        return compile_steps(self.steps)
