"""The unit-time simulation of csrc/sim in plain Python. It computes the same integers.

`symm_overlap.pipeline.simulation.unit_time` documents what is computed. The plain Python form of the pass that adds
sends and receives is `symm_overlap.pipeline.lowering.send_recv`.
"""

from __future__ import annotations

from symm_overlap.pipeline import Schedule
from symm_overlap.pipeline.simulation.encoded import NUMBERS, WAIT, Encoded, code_of, encode, parts_of
from symm_overlap.pipeline.simulation.unit_time import DeadlockError, UnitTime
from symm_overlap.plan.work import integers

F, I, B = NUMBERS["F"], NUMBERS["I"], NUMBERS["B"]  # noqa: E741 (torch's letters)
SEND_F, RECV_F = NUMBERS["SEND_F"], NUMBERS["RECV_F"]
SEND_B, RECV_B = NUMBERS["SEND_B"], NUMBERS["RECV_B"]


class _Done:
    """The actions that are done, and whether another action has all that it needs."""

    def __init__(self, encoded: Encoded) -> None:
        self._placement = encoded.placement
        self._length = len(encoded.placement) // encoded.pipelines
        self._done: set[int] = set()
        self.add = self._done.add

    def has(self, kind: int, stage: int, microbatch: int) -> bool:
        return code_of(kind, stage, microbatch) in self._done

    def before(self, stage: int) -> int:
        """Return the stage whose output is the input of ``stage``, or -1."""
        return stage - 1 if stage % self._length else -1

    def after(self, stage: int) -> int:
        """Return the stage whose input is the output of ``stage``, or -1."""
        return stage + 1 if (stage + 1) % self._length else -1

    def has_input(self, kind: int, stage: int, microbatch: int) -> bool:
        """True if a forward or a backward has its input: it was received, or the neighbouring stage on the same rank
        has computed it."""
        made: tuple[int, ...]
        if kind == F:
            neighbour, recv, made = self.before(stage), RECV_F, (F,)
        elif kind in (I, B):
            neighbour, recv, made = self.after(stage), RECV_B, (I, B)
        else:
            return True
        if neighbour < 0 or self.has(recv, stage, microbatch):
            return True
        same_rank = self._placement[neighbour] == self._placement[stage]
        return same_rank and any(self.has(other, neighbour, microbatch) for other in made)

    def send_of(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the cell of the send that belongs to a receive; 0 if there is no stage that could send it."""
        neighbour = self.before(stage) if kind == RECV_F else self.after(stage)
        return code_of(SEND_F if kind == RECV_F else SEND_B, neighbour, microbatch) if neighbour >= 0 else 0

    def ready_here(self, kind: int, stage: int, microbatch: int) -> bool:
        """True if everything is done that an action needs on its own rank. The action is not a receive."""
        if kind == SEND_F:
            return self.has(F, stage, microbatch)
        if kind == SEND_B:
            return self.has(I, stage, microbatch) or self.has(B, stage, microbatch)
        if kind >= WAIT:
            return self.has(kind - WAIT, stage, microbatch)
        return self.has_input(kind, stage, microbatch)


def simulate_unit_time(schedule: Schedule) -> UnitTime:
    """See `symm_overlap.pipeline.simulation.unit_time.simulate_unit_time`."""
    encoded = encode(schedule)
    run = _Run(encoded)
    run.all()
    result = UnitTime(encoded, integers(run.steps), max(run.steps, default=-1) + 1)
    if not all(map(run.over, range(encoded.ranks))):
        raise DeadlockError(result)
    return result


class _Run:
    """How far each rank has come, and at which step each of its actions ran."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self.done = _Done(encoded)
        self.steps = [-1] * len(encoded.cells)
        self.rows = [
            [cell for cell in range(encoded.starts[rank], encoded.starts[rank + 1]) if encoded.cells[cell]]
            for rank in range(encoded.ranks)
        ]
        self.position = [0] * encoded.ranks  # in the row
        self.clock = [0] * encoded.ranks  # the next free step
        self.sent: dict[int, int] = {}  # the step of each send
        self.waiting: dict[int, int] = {}  # the rank that waits for a send

    def all(self) -> None:
        """Run each rank until it reaches a receive whose send has not run yet, and go on when the send has run."""
        runnable = list(reversed(range(self.encoded.ranks)))
        while runnable:
            rank = runnable.pop()
            while not self.over(rank) and self.ready(rank):
                runnable += self.take(rank)

    def over(self, rank: int) -> bool:
        return self.position[rank] == len(self.rows[rank])

    def leaves(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the fields of a rank's next action, or, for a compound, the fields of each part."""
        return list(parts_of(self.encoded.cells[self.rows[rank][self.position[rank]]], self.encoded.parts))

    def ready(self, rank: int) -> bool:
        """True if a rank's next action can run. If a send is missing, the rank is noted as waiting for it."""
        for kind, stage, microbatch in self.leaves(rank):
            if kind in (RECV_F, RECV_B):
                send = self.done.send_of(kind, stage, microbatch)
                if send not in self.sent:
                    self.waiting[send] = rank
                    return False
            elif not self.done.ready_here(kind, stage, microbatch):
                return False
        return True

    def take(self, rank: int) -> list[int]:
        """Run a rank's next action. Return the ranks that waited for it."""
        leaves, step = self.leaves(rank), self.clock[rank]
        for leaf in leaves:
            if leaf[0] in (RECV_F, RECV_B):
                step = max(step, self.sent[self.done.send_of(*leaf)])
        for leaf in leaves:
            self.done.add(code_of(*leaf))
            if leaf[0] in (SEND_F, SEND_B):
                self.sent.setdefault(code_of(*leaf), step)
        self.steps[self.rows[rank][self.position[rank]]] = step
        self.position[rank] += 1
        self.clock[rank] = step + 1
        return [self.waiting.pop(send) for send in (code_of(*leaf) for leaf in leaves) if send in self.waiting]
