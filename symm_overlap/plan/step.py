"""Regions, steps and plans: an overlapped collective as data.

A plan is one rank's ordered tuple of steps. Each step names the stream that runs it, the memory it reads and writes,
and the earlier steps of other streams it must follow; ranks meet only in barriers and in signal/wait pairs. The same
value is executed, verified, simulated and drawn, so what ships is what was proven.

A step's kind says what runs:

========  ==========================================================================================================
fork      first step, on the caller's stream: the caller's inputs are ready, perhaps newly written
join      last step, on the caller's stream: the caller may read the outputs and overwrite the inputs
publish   copy ``reads[0]`` (my input) to ``writes[0]`` (memory my peers can read)
pull      copy ``reads[0]`` (a peer's memory, or my own input) to ``writes[0]`` (mine)
push      copy ``reads[0]`` (mine) to ``writes[0]`` (a peer's memory)
produce   compute a chunk that is for rank ``chunk[0]``
consume   compute with a chunk that comes from rank ``chunk[0]``
reduce    sum ``reads``, in the order given, into each of ``writes``
signal    tell ``peer``, on ``channel``, that everything before this step is done
wait      the n-th wait on a (peer, channel) returns once that peer's n-th signal has come
barrier   returns once every rank has arrived
sleep     let other streams go first; orders nothing
========  ==========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .program import Program, compile_steps

COPIES = frozenset({"publish", "pull", "push"})
COMPUTES = frozenset({"produce", "consume", "reduce"})
MEETINGS = frozenset({"signal", "wait", "barrier"})
KINDS = COPIES | COMPUTES | MEETINGS | {"fork", "join", "sleep"}

CHANNELS = 4
"""Channels a plan may use: 0 and 1 for the first exchange of a call (one a compute stream), 2 and 3 for the second."""


@dataclass(frozen=True, slots=True)
class Region:
    """Units ``start`` to ``stop`` (half open) of ``buffer`` in the memory of ``rank``. A unit is one chunk."""

    buffer: str
    rank: int
    start: int
    stop: int

    def __str__(self) -> str:
        units = str(self.start) if self.stop == self.start + 1 else f"{self.start}:{self.stop}"
        return f"{self.buffer}@{self.rank}[{units}]"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one stream of one rank; the module's text lists the kinds."""

    kind: str
    stream: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    after: tuple[int, ...] = ()  # indices of earlier steps of the same plan that run on other streams
    peer: int | None = None
    channel: int | None = None
    chunk: tuple[int, int] | None = None  # (rank the chunk is for or comes from, piece of that rank's part)
    label: str = ""  # a wait and the signal it pairs with carry the same one; a barrier says what it protects

    def __str__(self) -> str:
        words = [self.kind]
        if self.chunk is not None:
            words.append(f"chunk {self.chunk[0]}.{self.chunk[1]}")
        if self.kind in ("signal", "wait"):
            words.append(f"{'to' if self.kind == 'signal' else 'for'} rank {self.peer}")
        if self.channel is not None:
            words.append(f"channel {self.channel}")
        if self.label:
            words.append(self.label)
        return " ".join(words) + f" on {self.stream}"


@dataclass(frozen=True)
class Plan:
    """The steps of one rank. A stream runs its steps in tuple order; so may one thread that runs the whole plan."""

    op: str
    rank: int
    world: int
    parity: int
    steps: tuple[Step, ...]

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first appearance; the first is the caller's."""
        return tuple(dict.fromkeys(step.stream for step in self.steps))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its steps."""
        return frozenset(step.kind for step in self.steps)

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
