"""A schedule as integers. csrc/sim works on this form.

Each cell is one 64-bit integer, and the rows follow one another::

    bits 48 and up   the number of the action's kind; 0 for an empty cell
    bits 24 to 47    microbatch + 1; 0 for an action without one
    bits  0 to 23    stage

The cell of a compound, ``OVERLAP_F_B``, has the number of its parts in the bits of the stage. In the bits of the
microbatch, it has the index of its first part in the array of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ... import _sim
from ...plan.work import integers
from ..action import Action, compound_of
from ..schedule import Schedule

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
"""The kinds of actions. The index of a kind is its number, as in the enum of csrc/sim/cells.h."""

WAIT = 16
"""The number of a WAIT action is the number of the kind that it waits for, plus this."""

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
        cells: the cells of all ranks, in the encoding of this module.
        starts: (ranks + 1,), the index of the first cell of each rank; the last entry is the number of cells.
        parts: the parts of the compounds, in the same encoding.
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
        """The number of ranks, which is the number of rows."""
        return len(self.starts) - 1

    def row(self, rank: int) -> memoryview[int]:
        """Return the cells of a rank."""
        return self.cells[self.starts[rank] : self.starts[rank + 1]]

    def action(self, code: int) -> Action | None:
        """Return the action of a cell, or None if it is empty."""
        return self.decoder()(code)

    def decoder(self) -> Decoder:
        """Return a function that turns cells into actions. Equal cells become the same object."""
        return Decoder(self.parts)

    def schedule(self) -> Schedule:
        """Return the schedule that these integers encode."""
        decode = self.decoder()
        rows = tuple(tuple(map(decode, self.row(rank))) for rank in range(self.ranks))
        return Schedule(rows, tuple(self.placement), self.microbatches, self.pipelines)


class Decoder:
    """A function that turns cells into actions. It caches the actions that it has created."""

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
    """Return (number of the kind, stage, microbatch) of a cell. The microbatch is -1 if the action has none."""
    return code >> 2 * BITS, code & MASK, (code >> BITS & MASK) - 1


def code_of(kind: int, stage: int, microbatch: int) -> int:
    """Return the cell of an action. This is the inverse of `fields`."""
    return kind << 2 * BITS | microbatch + 1 << BITS | stage


def parts_of(code: int, parts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a cell's action, or, for a compound, the fields of each part."""
    kind, stage, microbatch = fields(code)
    if kind != OVERLAP:
        yield kind, stage, microbatch
        return
    for part in parts[microbatch : microbatch + stage]:
        yield fields(part)


def encode(schedule: Schedule) -> Encoded:
    """Return a schedule as integers.

    Raises:
        ValueError: an action has an unknown kind, a stage that does not exist or is on another rank, or a microbatch
            below 0; the message names the rank, the cell and the action. Or the stages or microbatches are so many that
            their numbers do not fit.
    """
    cells, starts, parts = map(integers, _sim.encode(schedule.rows, schedule.placement, schedule.microbatches, NUMBERS))
    placement = placement_of(schedule.placement)
    return Encoded(cells, starts, parts, placement, schedule.microbatches, schedule.pipelines)


def with_messages(encoded: Encoded) -> Encoded:
    """Return the schedule with sends and receives, as `lowering.add_send_recv` does, without creating the actions.

    The schedule is returned unchanged if they cannot be added: it has them already, or a simulator will find that it
    deadlocks.
    """
    lowered = _sim.add_send_recv(encoded)
    return encoded if lowered is None else encoded._replace(cells=integers(lowered[0]), starts=integers(lowered[1]))


@lru_cache(maxsize=256)
def placement_of(placement: tuple[int, ...]) -> memoryview[int]:
    """Return the rank of each stage in the form that `Encoded` stores."""
    return integers(placement)
