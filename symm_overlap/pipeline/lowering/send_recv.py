"""Pass: move activations and gradients between ranks.

Behind every forward whose output goes to another rank comes its SEND_F, and the RECV_F goes to the end of what the
other rank has so far; backward likewise. Sends and receives of a link are placed together, so they are in one order on
both ranks. A stage that follows another one on the same rank takes its output directly: no message.

A rank's next action is placed when all its inputs are there: they were received, or made on the rank. Ranks take turns,
one cell each, so an empty cell of the table lets a rank wait for one turn, in which others place their messages.
"""

from __future__ import annotations

from ..action import (
    BACKWARD_INPUT,
    COMMUNICATION,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
)
from ..schedule import Schedule, where

_KINDS = {FORWARD: (SEND_F, RECV_F), FULL_BACKWARD: (SEND_B, RECV_B), BACKWARD_INPUT: (SEND_B, RECV_B)}
"""For each kind of action whose result another stage needs, the kinds of its messages."""


def add_send_recv(schedule: Schedule) -> Schedule:
    """Put SEND and RECV where results pass from one rank to another. Empty cells are left out.

    Equals ``_add_send_recv`` of torch 2.11 to 2.15, in time proportional to the cells.

    Raises:
        ValueError: the table has messages already, or its actions cannot run in their order: the message says where
            each rank stands and what it waits for.
    """
    for row, actions in enumerate(schedule.rows):
        for cell, action in enumerate(actions):
            if action is not None and action.kind in COMMUNICATION:
                raise ValueError(f"{where(row, cell)}: the schedule has {action} already: this pass takes one without")
    return _Turns(schedule).run()


class _Turns:
    """The state of the pass: what each rank has placed, and which inputs are there."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.placed: list[list[Action]] = [[] for _ in schedule.rows]
        self.at = [0] * schedule.ranks
        # Activations and gradients that are on the rank of the stage that needs them: (stage, microbatch).
        self.activations: set[tuple[int, int | None]] = set()
        self.gradients: set[tuple[int, int | None]] = set()
        stages = range(schedule.stages)
        self.previous = [schedule.previous(stage) for stage in stages]
        self.following = [schedule.following(stage) for stage in stages]

    def run(self) -> Schedule:
        """Let the ranks take turns until all cells are placed."""
        rows, at = self.schedule.rows, self.at
        running = [rank for rank in range(self.schedule.ranks) if rows[rank]]
        while running:
            progress = False
            for rank in running:
                action = rows[rank][at[rank]]
                if action is None or self.place(rank, action):
                    at[rank] += 1
                    progress = True
            if not progress:
                raise ValueError(self.stuck(running))
            running = [rank for rank in running if at[rank] < len(rows[rank])]
        return self.schedule.with_rows(self.placed)

    def place(self, rank: int, action: Action) -> bool:
        """Place a rank's next action and the messages of its results, if its inputs are there."""
        leaves = action.parts or (action,)
        for leaf in leaves:
            if not self.ready(leaf):
                return False
        self.placed[rank].append(action)
        for leaf in leaves:
            kinds = _KINDS.get(leaf.kind)
            if kinds is None:
                continue
            forward = leaf.kind == FORWARD
            there = (self.following if forward else self.previous)[leaf.stage]
            if there is None:
                continue
            (self.activations if forward else self.gradients).add((there, leaf.microbatch))
            peer = self.schedule.placement[there]
            if peer != rank:
                self.placed[rank].append(Action(leaf.stage, kinds[0], leaf.microbatch))
                self.placed[peer].append(Action(there, kinds[1], leaf.microbatch))
        return True

    def ready(self, leaf: Action) -> bool:
        """Whether the inputs of an action are on its rank."""
        if leaf.kind == FORWARD:
            return self.previous[leaf.stage] is None or (leaf.stage, leaf.microbatch) in self.activations
        if leaf.kind in _KINDS:
            return self.following[leaf.stage] is None or (leaf.stage, leaf.microbatch) in self.gradients
        return True

    def stuck(self, running: list[int]) -> str:
        """Why no rank can go on."""
        lines = []
        for rank in running:
            action = self.schedule.rows[rank][self.at[rank]]
            assert action is not None, "an empty cell never waits"
            needs = " and ".join(self.input_of(leaf) for leaf in action.leaves if not self.ready(leaf))
            lines.append(f"{where(rank, self.at[rank])}: {action} waits for {needs}")
        return "the actions cannot run in this order, so no messages can be placed:\n" + "\n".join(lines)

    def input_of(self, leaf: Action) -> str:
        """The action whose result an action waits for, in words."""
        if leaf.kind == FORWARD:
            return f"{self.previous[leaf.stage]}F{leaf.microbatch}"
        after = self.following[leaf.stage]
        return f"the gradient of {after}B{leaf.microbatch} or {after}I{leaf.microbatch}"
