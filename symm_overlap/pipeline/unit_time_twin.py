"""What csrc/sim does in unit time, in plain Python: the same integers, to compare with and to read.

`symm_overlap.pipeline.unit_time` documents what is computed. The plain form of the pass that puts sends and receives is
in `symm_overlap.pipeline.lowering.send_recv`.
"""

from __future__ import annotations

from collections.abc import Callable

from .encoded import NUMBERS, WAIT, Encoded, code_of, fields, parts_of

F, I, B = NUMBERS["F"], NUMBERS["I"], NUMBERS["B"]  # noqa: E741 (torch's letters)
SEND_F, RECV_F = NUMBERS["SEND_F"], NUMBERS["RECV_F"]
SEND_B, RECV_B = NUMBERS["SEND_B"], NUMBERS["RECV_B"]


class _Done:
    """Which actions are done, and whether that is enough for another one."""

    def __init__(self, encoded: Encoded) -> None:
        self._placement = encoded.placement
        self._length = len(encoded.placement) // encoded.pipelines
        self._done: set[int] = set()
        self.add = self._done.add

    def has(self, kind: int, stage: int, microbatch: int) -> bool:
        return code_of(kind, stage, microbatch) in self._done

    def before(self, stage: int) -> int:
        """The stage whose output this one takes, or -1."""
        return stage - 1 if stage % self._length else -1

    def after(self, stage: int) -> int:
        """The stage that takes this one's output, or -1."""
        return stage + 1 if (stage + 1) % self._length else -1

    def has_input(self, kind: int, stage: int, microbatch: int) -> bool:
        """Whether a forward or a backward has its input, received or from the neighbouring stage on its own rank."""
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
        """The cell of the send that a receive takes; 0 if no stage could make it."""
        neighbour = self.before(stage) if kind == RECV_F else self.after(stage)
        return code_of(SEND_F if kind == RECV_F else SEND_B, neighbour, microbatch) if neighbour >= 0 else 0

    def ready_here(self, kind: int, stage: int, microbatch: int) -> bool:
        """Whether everything is done that an action other than a receive needs; all of it is on its own rank."""
        if kind == SEND_F:
            return self.has(F, stage, microbatch)
        if kind == SEND_B:
            return self.has(I, stage, microbatch) or self.has(B, stage, microbatch)
        if kind >= WAIT:
            return self.has(kind - WAIT, stage, microbatch)
        return self.has_input(kind, stage, microbatch)


def unit_time(encoded: Encoded, peek: bool) -> tuple[list[int], int, bool]:
    """(the step of each cell, how many steps there are, whether every action is reached).

    The step is -1 for an empty cell and for one that is never reached.
    """
    run = _Run(encoded)
    (_run_peeking if peek else _run_ahead)(run)
    return run.steps, max(run.steps, default=-1) + 1, all(map(run.over, range(encoded.ranks)))


class _Run:
    """How far each rank is, and when each of its actions was."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self.done = _Done(encoded)
        self.steps = [-1] * len(encoded.cells)
        self.rows = [
            [cell for cell in range(encoded.starts[rank], encoded.starts[rank + 1]) if encoded.cells[cell]]
            for rank in range(encoded.ranks)
        ]
        self.position = [0] * encoded.ranks  # in the row
        self.sent: dict[int, int] = {}  # the step of each send

    def over(self, rank: int) -> bool:
        return self.position[rank] == len(self.rows[rank])

    def head(self, rank: int) -> int:
        """The cell that a rank is at."""
        return self.encoded.cells[self.rows[rank][self.position[rank]]]

    def ready(self, rank: int, recv_ready: Callable[[int], bool]) -> bool:
        """Whether a rank's next action can be run; ``recv_ready`` says it of a receive, by the send that it takes."""
        for kind, stage, microbatch in parts_of(self.head(rank), self.encoded.parts):
            if kind in (RECV_F, RECV_B):
                send = self.done.send_of(kind, stage, microbatch)
                if not (send and recv_ready(send)):
                    return False
            elif not self.done.ready_here(kind, stage, microbatch):
                return False
        return True

    def take(self, rank: int, step: int) -> None:
        """Run a rank's next action."""
        for leaf in parts_of(self.head(rank), self.encoded.parts):
            self.done.add(code_of(*leaf))
            if leaf[0] in (SEND_F, SEND_B):
                self.sent.setdefault(code_of(*leaf), step)
        self.steps[self.rows[rank][self.position[rank]]] = step
        self.position[rank] += 1


def _run_ahead(run: _Run) -> None:
    """Run each rank up to a receive whose send has not been run yet, and on when it is."""
    clock = [0] * run.encoded.ranks
    waiting: dict[int, int] = {}  # the rank that waits for a send
    runnable = list(reversed(range(run.encoded.ranks)))
    while runnable:
        rank = runnable.pop()

        def sent(send: int, rank: int = rank) -> bool:
            if send in run.sent:
                return True
            waiting[send] = rank
            return False

        while not run.over(rank) and run.ready(rank, sent):
            leaves = list(parts_of(run.head(rank), run.encoded.parts))
            recvs = [run.sent[run.done.send_of(*leaf)] for leaf in leaves if leaf[0] in (RECV_F, RECV_B)]
            step = max([clock[rank], *recvs])
            run.take(rank, step)
            clock[rank] = step + 1
            runnable += [waiting.pop(send) for send in (code_of(*leaf) for leaf in leaves) if send in waiting]


def _run_peeking(run: _Run) -> None:
    """Step by step, the ranks in order, and those that could not go once more."""

    def peek(send: int) -> bool:
        peer = run.encoded.placement[fields(send)[1]]
        return send in run.sent or (not run.over(peer) and run.head(peer) == send)

    step = 0
    active = [rank for rank in range(run.encoded.ranks) if not run.over(rank)]
    while active:
        waiting = []
        for rank in active:
            if run.ready(rank, peek):
                run.take(rank, step)
            else:
                waiting.append(rank)
        if len(waiting) == len(active):
            return
        for rank in waiting:
            if run.ready(rank, peek):
                run.take(rank, step)
        active = [rank for rank in active if not run.over(rank)]
        step += 1
