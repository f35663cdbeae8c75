"""One rank's row of a schedule as a plan, which the runtime executes and `symm_overlap.plan.verify` checks.

Every action becomes a step of its own kind. The plan declares the memory that actions share, with one unit for each
microbatch of each stage. The slots of a link (`symm_overlap.pipeline.slots`) are in the workspace of its receiver.

On channel 0, a rank signals to every other rank that its previous step is over. Before its own step ends, it waits for
the same signal from all of them. This makes it safe to use the two halves of the workspace in turn
(`symm_overlap.runtime.lane`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..plan import Builder, Life, Plan, Region
from . import kinds as kinds  # registers them
from .action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_F,
    RECVS,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    SENDS,
    UNSHARD,
    WHOLE_STAGE,
    Action,
)
from .schedule import Schedule
from .slots import Link

COMPUTE, COPY = "compute", "copy"
START = 0
"""The channel on which ranks signal each other that their previous step is over."""

_STAGE_MEMORY = {"parameters": Life.PERSISTENT, "parameter gradients": Life.PERSISTENT}
_MICROBATCH_MEMORY = {
    "batch": Life.INPUT,  # what the caller passes to the first stages
    "results": Life.OUTPUT,  # what the last stages return to the caller
    "inputs": Life.SCRATCH,  # activations that were received for a forward
    "outputs": Life.SCRATCH,  # the output of a forward, for the next stage
    "saved": Life.SCRATCH,  # what a forward keeps for its backward
    "output gradients": Life.SCRATCH,
    "input gradients": Life.SCRATCH,
    "kept": Life.SCRATCH,  # what the first half of a split backward keeps for the second
}


def channels_of(links: Mapping[tuple[int, str], Link]) -> dict[tuple[int, str], int]:
    """Return the channel of each link. Channels count from 1 for each pair of a sender and a receiver."""
    used: dict[tuple[int, int], int] = {}
    found = {}
    for key, link in links.items():
        pair = link.source, link.target
        found[key] = used[pair] = used.get(pair, START) + 1
    return found


def step_plan(
    schedule: Schedule, links: Mapping[tuple[int, str], Link], rank: int, *, copy: str = COMPUTE, symmetric: bool = True
) -> Plan:
    """Return the plan of one rank's step.

    Args:
        schedule: a schedule with its sends and receives.
        links: the links of this schedule (`symm_overlap.pipeline.slots.links`).
        rank: the rank whose plan is returned.
        copy: the stream of the sends.
        symmetric: True if messages go through the slots. If False, a library carries them in its own memory.
    """
    return _StepBuilder(schedule, links, rank, copy, symmetric).plan()


class _StepBuilder(Builder):
    """Collects the steps of one rank's row."""

    def __init__(
        self, schedule: Schedule, links: Mapping[tuple[int, str], Link], rank: int, copy: str, symmetric: bool
    ) -> None:
        self.schedule, self.links, self.copy, self.symmetric = schedule, links, copy, symmetric
        self._channels = channels_of(links)
        rings = {_ring(*key): Life.CALL for key in links} if symmetric else {}
        units = schedule.stages * schedule.microbatches
        firsts = any(schedule.previous_stage(stage) is None for stage in schedule.stages_of_ranks[rank])
        super().__init__(
            "pipeline step",
            rank,
            schedule.ranks,
            stream=COMPUTE,
            buffers={**_STAGE_MEMORY, **_MICROBATCH_MEMORY, **rings},
            inputs={"batch": units} if firsts else {},
        )

    def plan(self) -> Plan:
        peers = [peer for peer in range(self.world) if peer != self.rank] if self.symmetric else []
        self.signal(COMPUTE, peers, START, label="the previous step is over")
        for action in self.schedule.rows[self.rank]:
            if action is not None:
                self._add(action)
        self.wait(COMPUTE, peers, START, label="the previous step is over")
        last = [stage for stage in self.schedule.stages_of_ranks[self.rank] if self.schedule.next_stage(stage) is None]
        results = [
            self._at("results", stage, each)
            for stage in last
            for each in self.schedule.microbatches_of(stage)
            if Action(stage, FORWARD, each) in self._forwards()
        ]
        return self.finish(*results)

    def _forwards(self) -> set[Action]:
        row = self.schedule.rows[self.rank]
        return {leaf for action in row if action for leaf in action.leaves if leaf.kind == FORWARD}

    def _add(self, action: Action) -> None:
        if action.kind in SENDS:
            self._send(action)
        elif action.kind in RECVS:
            self._receive(action)
        else:
            touched = [self._touched(leaf) for leaf in action.leaves]
            reads = list(dict.fromkeys(region for each, _ in touched for region in each))
            writes = list(dict.fromkeys(region for _, each in touched for region in each))
            simple = not action.parts and action.kind not in WHOLE_STAGE
            chunk = (action.stage, action.microbatch or 0) if simple else None
            self.add(action.kind, COMPUTE, reads=reads, writes=writes, chunk=chunk, label=str(action))

    def _send(self, send: Action) -> None:
        link = self.links[send.stage, send.kind]
        assert send.microbatch is not None
        what = "outputs" if send.kind == SEND_F else "input gradients"
        slot = link.slot_of[send.microbatch]
        writes = [Region(_ring(send.stage, send.kind), link.target, slot, slot + 1)] if self.symmetric else []
        self.add(
            send.kind,
            self.copy,
            reads=[self._at(what, send.stage, send.microbatch)],
            writes=writes,
            # A send follows everything before it in the row, and not only the action that computed the message. The
            # computation of the sizes of the rings relies on this.
            after=self.ends,
            peers=(link.target,),
            channel=self._channels[send.stage, send.kind],
            chunk=(send.stage, send.microbatch),
            label=str(send),
        )

    def _receive(self, receive: Action) -> None:
        kind, step, what = (SEND_F, -1, "inputs") if receive.kind == RECV_F else (SEND_B, 1, "output gradients")
        link = self.links[receive.stage + step, kind]
        assert receive.microbatch is not None
        slot = link.slot_of[receive.microbatch]
        self.add(
            receive.kind,
            COMPUTE,
            reads=[self.here(_ring(link.stage, kind), slot)] if self.symmetric else [],
            writes=[self._at(what, receive.stage, receive.microbatch)],
            peers=(link.source,),
            channel=self._channels[link.stage, kind],
            chunk=(receive.stage, receive.microbatch),
            label=str(Action(link.stage, kind, receive.microbatch)),
        )

    def _touched(self, action: Action) -> tuple[list[Region], list[Region]]:
        """Return the regions that an action reads, and those that it writes. The action is not a message."""
        stage, microbatch = action.stage, action.microbatch
        parameters = self.here("parameters", stage)
        gradients = self.here("parameter gradients", stage)
        if action.kind in (UNSHARD, RESHARD):
            return [], [parameters]
        if action.kind == REDUCE_GRAD:
            return [gradients], [gradients]
        if microbatch is None or action.kind not in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            return [], []
        saved, kept = self._at("saved", stage, microbatch), self._at("kept", stage, microbatch)
        if action.kind == FORWARD:
            made = "results" if self.schedule.next_stage(stage) is None else "outputs"
            return [parameters, self._input(stage, microbatch)], [self._at(made, stage, microbatch), saved]
        if action.kind == BACKWARD_WEIGHT:
            return [parameters, kept, gradients], [gradients]
        reads = [parameters, saved, *self._output_gradient(stage, microbatch)]
        writes = [self._at("input gradients", stage, microbatch)]
        if action.kind == BACKWARD_INPUT:
            return reads, [*writes, kept]
        return [*reads, gradients], [*writes, gradients]

    def _input(self, stage: int, microbatch: int) -> Region:
        previous = self.schedule.previous_stage(stage)
        if previous is None:
            return self._at("batch", stage, microbatch)
        if self.schedule.rank_of(previous) == self.rank:
            return self._at("outputs", previous, microbatch)
        return self._at("inputs", stage, microbatch)

    def _output_gradient(self, stage: int, microbatch: int) -> Iterator[Region]:
        next_stage = self.schedule.next_stage(stage)
        if next_stage is not None:
            here = self.schedule.rank_of(next_stage) == self.rank
            what, owner = ("input gradients", next_stage) if here else ("output gradients", stage)
            yield self._at(what, owner, microbatch)

    def _at(self, buffer: str, stage: int, microbatch: int) -> Region:
        return self.here(buffer, stage * self.schedule.microbatches + microbatch)


def _ring(stage: int, kind: str) -> str:
    """Return the name of a link's ring of slots."""
    return f"{stage}{kind}"
