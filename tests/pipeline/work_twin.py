"""`pipeline_work` in plain Python: the twin of csrc/sim/pipeline_work.cpp, which returns the same arrays."""

from __future__ import annotations

from collections.abc import Iterator

from symm_overlap.pipeline.simulation.encoded import NUMBERS, OVERLAP, WAIT, Encoded, fields, parts_of
from symm_overlap.pipeline.simulation.work import STREAMS, Durations
from symm_overlap.plan.work import Work, doubles, integers, starts_of

F, I, W, B = (NUMBERS[kind] for kind in "FIWB")  # noqa: E741 (torch's letters)
SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD = (
    NUMBERS[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
)
_STREAM = {SEND_F: "send", SEND_B: "send", UNSHARD: "gather", REDUCE_GRAD: "reduce"}
_MOVES = (SEND_F, SEND_B, UNSHARD, REDUCE_GRAD)
_COMPUTES = (F, I, W, B, OVERLAP)


def pipeline_work(
    encoded: Encoded, durations: Durations, overlap: float, slow_down: float, one_receive_stream: bool
) -> Work:
    """See `symm_overlap.pipeline.simulation.work.pipeline_work`."""
    return _Builder(encoded, durations, overlap, one_receive_stream).work(slow_down)


class _Builder:
    def __init__(self, encoded: Encoded, durations: Durations, overlap: float, one_receive_stream: bool) -> None:
        self._encoded, self._durations, self._overlap = encoded, durations, overlap
        self._one_receive_stream = one_receive_stream
        self._length = len(encoded.placement) // encoded.pipelines
        self._first: dict[tuple[int, int, int], int] = {}
        self._unshard: dict[int, int] = {}  # for each stage, its last UNSHARD so far
        self._backward: dict[int, int] = {}  # for each stage, the last action so far that computed parameter gradients
        self._reshard: int | None = None  # the last RESHARD of the rank so far
        for number, code in enumerate(encoded.cells):
            for leaf in parts_of(code, encoded.parts):
                self._first.setdefault(leaf, number)

    def work(self, slow_down: float) -> Work:
        """Return all cells as work."""
        encoded = self._encoded
        streams, kinds, bodies, tails = [], [], [], []
        after: list[list[int]] = []
        for rank in range(encoded.ranks):
            self._reshard = None
            for number in range(encoded.starts[rank], encoded.starts[rank + 1]):
                kind = encoded.cells[number] >> 48
                kinds.append((rank, kind))
                streams.append(rank * (len(STREAMS) + encoded.ranks) + self._stream(encoded.cells[number]))
                body, tail = self._duration(encoded.cells[number])
                bodies.append(body)
                tails.append(tail)
                leaves = list(parts_of(encoded.cells[number], encoded.parts))
                after.append([earlier for leaf in leaves for earlier in self._after(leaf)])
                for leaf in leaves:
                    self._note(leaf, number)
        moves = [rank if kind in _MOVES else -1 for rank, kind in kinds]
        holds = [[rank] if rank >= 0 else [] for rank in moves]
        return Work(
            stream=integers(streams),
            after_starts=integers(starts_of(after)),
            after=integers(earlier for each in after for earlier in each),
            holds_starts=integers(starts_of(holds)),
            holds=integers(rank for each in holds for rank in each),
            body=doubles(bodies),
            tail=doubles(tails),
            lottery=integers([-1] * len(encoded.cells)),
            lot_starts=integers([0]),
            lots=doubles(()),
            loads=integers(moves),
            slowed=integers(rank if kind in _COMPUTES else -1 for rank, kind in kinds),
            slow_down=doubles([slow_down] * encoded.ranks),
        )

    def _stream(self, code: int) -> int:
        kind, stage, _ = fields(code)
        if kind not in (RECV_F, RECV_B):
            return STREAMS.index(_STREAM.get(kind, "compute"))
        sender = self._before(stage) if kind == RECV_F else self._behind(stage)
        unknown = sender < 0 or self._one_receive_stream
        return len(STREAMS) + (0 if unknown else self._encoded.placement[sender])

    def _before(self, stage: int) -> int:
        return stage - 1 if stage % self._length else -1

    def _behind(self, stage: int) -> int:
        return stage + 1 if (stage + 1) % self._length else -1

    def _duration(self, code: int) -> tuple[float, float]:
        stages, body, tail = len(self._encoded.placement), 0.0, 0.0
        for kind, stage, _ in parts_of(code, self._encoded.parts):
            body += self._durations.body[kind * stages + stage]
            tail = self._durations.tail[kind * stages + stage]
        return (self._overlap * body, 0.0) if code >> 48 == OVERLAP else (body, tail)

    def _note(self, leaf: tuple[int, int, int], number: int) -> None:
        kind, stage, _ = leaf
        if kind == UNSHARD:
            self._unshard[stage] = number
        elif kind == RESHARD:
            self._reshard = number
        elif kind in (W, B):
            self._backward[stage] = number

    def _after(self, leaf: tuple[int, int, int]) -> Iterator[int]:
        """Yield the numbers of the actions that an action follows; -1 for an action that is not in the schedule."""
        kind, stage, microbatch = leaf
        before, behind = self._before(stage), self._behind(stage)
        if kind == F:
            yield from self._input(leaf, before, RECV_F, (F,))
        elif kind in (I, B):
            yield from self._input(leaf, behind, RECV_B, (I, B))
        elif kind == SEND_F:
            yield self._number((F,), stage, microbatch)
        elif kind == SEND_B:
            yield self._number((I, B), stage, microbatch)
        elif kind == RECV_F:
            yield self._number((SEND_F,), before, microbatch)
        elif kind == RECV_B:
            yield self._number((SEND_B,), behind, microbatch)
        elif kind == UNSHARD and self._reshard is not None:
            yield self._reshard
        elif kind == REDUCE_GRAD and stage in self._backward:
            yield self._backward[stage]
        elif kind >= WAIT:
            yield self._number((kind - WAIT,), stage, microbatch)
        if kind in _COMPUTES and stage in self._unshard:
            yield self._unshard[stage]

    def _input(self, leaf: tuple[int, int, int], neighbour: int, recv: int, made: tuple[int, ...]) -> Iterator[int]:
        _, stage, microbatch = leaf
        if neighbour >= 0:
            here = self._encoded.placement[neighbour] == self._encoded.placement[stage]
            yield self._number(made, neighbour, microbatch) if here else self._number((recv,), stage, microbatch)

    def _number(self, kinds: tuple[int, ...], stage: int, microbatch: int) -> int:
        """Return the number of the first of these actions that is in the schedule; -1 if none is."""
        return next((self._first[key] for kind in kinds if (key := (kind, stage, microbatch)) in self._first), -1)
