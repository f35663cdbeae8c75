"""A schedule as integers, which is what csrc/sim and its twin in plain Python work on.

One 64-bit integer a cell, row after row::

    bits 48 and up   the number of the action's kind; 0 for an empty cell
    bits 24 to 47    microbatch + 1; 0 for an action without one
    bits  0 to 23    stage

The cell of a compound, ``OVERLAP_F_B``, has the number of its parts where others have the stage, and the index of its
first part in the array of parts where others have the microbatch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from .. import _sim
from .action import Action, compound_of
from .schedule import Schedule

KINDS = (
    "",
    "F",
    "I",
    "W",
    "B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "OVERLAP_F_B",
)
"""The kinds of actions by their numbers, as in the enum of csrc/sim/cells.h."""

WAIT = 16
"""What is added to the number of a kind for the action that waits for it."""

NUMBERS = {kind: number for number, kind in enumerate(KINDS) if kind}
NUMBERS |= {
    kind: WAIT + NUMBERS[kind.removeprefix("WAIT_")] for kind in ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
}
OVERLAP = NUMBERS["OVERLAP_F_B"]
NAMES = {number: kind for kind, number in NUMBERS.items()}
BITS = 24
MASK = (1 << BITS) - 1


class Encoded(NamedTuple):
    """A schedule as integers. All arrays are views of memory that does not change.

    Attributes:
        cells: the cells of all ranks, as above.
        starts: (ranks + 1,), where each rank's cells start; the last is where they end.
        parts: the parts of the compounds.
        placement: (stages,), the rank of each stage.
        microbatches, pipelines: see `Schedule`.
    """

    cells: memoryview[int]
    starts: memoryview[int]
    parts: memoryview[int]
    placement: memoryview[int]
    microbatches: int
    pipelines: int = 1

    @property
    def ranks(self) -> int:
        """How many rows there are."""
        return len(self.starts) - 1

    def row(self, rank: int) -> memoryview[int]:
        """The cells of a rank."""
        return self.cells[self.starts[rank] : self.starts[rank + 1]]

    def action(self, code: int) -> Action | None:
        """The action of a cell, or None if it is empty."""
        return self.decoder()(code)

    def decoder(self) -> Decoder:
        """What turns cells into actions: equal cells into the same object."""
        return Decoder(self.parts)

    def schedule(self) -> Schedule:
        """The schedule that this stands for."""
        decode = self.decoder()
        rows = tuple(tuple(map(decode, self.row(rank))) for rank in range(self.ranks))
        return Schedule(rows, tuple(self.placement), self.microbatches, self.pipelines)


class Decoder:
    """Turns cells into actions: a function that remembers what it has made."""

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts = parts
        self._known: dict[int, Action | None] = {0: None}

    def __call__(self, code: int) -> Action | None:
        try:
            return self._known[code]
        except KeyError:
            return self._known.setdefault(code, self._new(code))

    def _new(self, code: int) -> Action:
        kind, stage, microbatch = fields(code)
        if kind == OVERLAP:
            parts = tuple(self._new(part) for part in self._parts[microbatch : microbatch + stage])
            return compound_of(*parts)
        return Action(stage, NAMES[kind], microbatch if microbatch >= 0 else None)


def fields(code: int) -> tuple[int, int, int]:
    """(number of the kind, stage, microbatch or -1) of a cell."""
    return code >> 2 * BITS, code & MASK, (code >> BITS & MASK) - 1


def code_of(kind: int, stage: int, microbatch: int) -> int:
    """The cell of an action; the opposite of `fields`."""
    return kind << 2 * BITS | microbatch + 1 << BITS | stage


def parts_of(code: int, parts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The fields of a cell's action, or of each part of a compound."""
    kind, stage, microbatch = fields(code)
    if kind != OVERLAP:
        yield kind, stage, microbatch
        return
    for part in parts[microbatch : microbatch + stage]:
        yield fields(part)


def encode(schedule: Schedule) -> Encoded:
    """The integers of a schedule.

    Raises:
        ValueError: an action of a kind that is not known, of a stage that does not exist or that is on another rank, or
            a microbatch below 0. The message names the rank, the cell and the action.
    """
    cells, starts, parts = map(integers, _sim.encode(schedule.rows, schedule.placement, schedule.microbatches, NUMBERS))
    placement = placement_of(schedule.placement)
    return Encoded(cells, starts, parts, placement, schedule.microbatches, schedule.pipelines)


def integers(values: bytes | Sequence[int]) -> memoryview[int]:
    """A view of 64-bit integers that cannot be written to: of bytes as they are, or of numbers."""
    return memoryview(values if isinstance(values, bytes) else array("q", values).tobytes()).cast("q")


@lru_cache(maxsize=256)
def placement_of(placement: tuple[int, ...]) -> memoryview[int]:
    """The rank of each stage, as `Encoded` has it."""
    return integers(placement)
