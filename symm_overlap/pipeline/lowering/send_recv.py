"""Pass: move activations and gradients between ranks.

After every forward whose output goes to another rank, the pass places its SEND_F. At the same time it appends the
RECV_F to the row that the other rank has so far. Backwards are handled likewise. The send and the receive of a message
are placed together, so the messages of a link have the same order on both ranks. If two neighbouring stages are on the
same rank, the second uses the output of the first directly, without a message.

A rank's next action is placed once all its inputs were received or computed on the rank. Ranks take turns, one cell
each. So an empty cell of the table lets a rank wait for one turn, in which the others place their messages.
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
    """Add a send and a receive wherever a result is needed on another rank. Empty cells are left out.

    The result equals that of ``_add_send_recv`` of torch 2.11 to 2.15. The pass takes time proportional to the number
    of cells.

    Raises:
        ValueError: the schedule has messages already, or its actions cannot run in their order. The message then says
            at which action each rank is stuck, and what this action waits for.
    """
    for row, actions in enumerate(schedule.rows):
        for cell, action in enumerate(actions):
            if action is not None and action.kind in COMMUNICATION:
                raise ValueError(f"{where(row, cell)}: the schedule has {action} already: remove all messages first")
    return _Turns(schedule).run()


class _Turns:
    """The state of the pass: the actions that each rank has placed, and the inputs that are available."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.placed: list[list[Action]] = [[] for _ in schedule.rows]
        self.at = [0] * schedule.ranks
        # Activations and gradients that are on the rank of the stage that needs them: (stage, microbatch).
        self.activations: set[tuple[int, int | None]] = set()
        self.gradients: set[tuple[int, int | None]] = set()
        stages = range(schedule.stages)
        self.previous_stage = [schedule.previous_stage(stage) for stage in stages]
        self.next_stage = [schedule.next_stage(stage) for stage in stages]

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
        """Place a rank's next action and the messages of its results, and return True, if its inputs are available."""
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
            there = (self.next_stage if forward else self.previous_stage)[leaf.stage]
            if there is None:
                continue
            (self.activations if forward else self.gradients).add((there, leaf.microbatch))
            peer = self.schedule.placement[there]
            if peer != rank:
                self.placed[rank].append(Action(leaf.stage, kinds[0], leaf.microbatch))
                self.placed[peer].append(Action(there, kinds[1], leaf.microbatch))
        return True

    def ready(self, leaf: Action) -> bool:
        """True if the inputs of an action are on its rank."""
        if leaf.kind == FORWARD:
            return self.previous_stage[leaf.stage] is None or (leaf.stage, leaf.microbatch) in self.activations
        if leaf.kind in _KINDS:
            return self.next_stage[leaf.stage] is None or (leaf.stage, leaf.microbatch) in self.gradients
        return True

    def stuck(self, running: list[int]) -> str:
        """Return an error message: why no rank can go on."""
        lines = []
        for rank in running:
            action = self.schedule.rows[rank][self.at[rank]]
            assert action is not None, "an empty cell never waits"
            needs = " and ".join(self.input_of(leaf) for leaf in action.leaves if not self.ready(leaf))
            lines.append(f"{where(rank, self.at[rank])}: {action} waits for {needs}")
        return "the actions cannot run in this order, so no messages can be placed:\n" + "\n".join(lines)

    def input_of(self, leaf: Action) -> str:
        """Return the text of the result that an action waits for."""
        if leaf.kind == FORWARD:
            return f"{self.previous_stage[leaf.stage]}F{leaf.microbatch}"
        after = self.next_stage[leaf.stage]
        return f"the gradient of {after}B{leaf.microbatch} or {after}I{leaf.microbatch}"
