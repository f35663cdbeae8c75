"""Small changes of a schedule: an action moves, a backward is split or merged, a rank gathers more or less far ahead.

Most changes start on the critical path. If two actions follow each other on it only because one rank runs them in this
order, another order may shorten the step. If one computes what the other needs, it cannot. (This is the neighbourhood
of job-shop scheduling by van Laarhoven, Aarts and Lenstra, 1992.)
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ..lowering.unshard import WINDOW
from ..simulation.activations import B, F, I, W
from ..simulation.cost_result import CostResult
from ..simulation.encoded import code_of, fields, parts_of
from .candidate import Candidate
from .shifts import shift

REACH = 12
"""The most places that an action moves."""

SHIFTS = 0.5
"""The fraction of changes that move many actions at once."""

Row = tuple[int, ...]
Arc = tuple[int, int, int]
"""A rank and two of its cells that follow each other on the critical path."""


def arcs(result: CostResult) -> list[Arc]:
    """Return the pairs of computing actions of one rank that follow each other on the critical path."""
    cells, starts, causes = result.encoded.cells, result.encoded.starts, result.times.causes
    ends = result.times.ends
    number = max(range(len(ends)), key=ends.__getitem__, default=-1)
    rank_of = [rank for rank in range(result.encoded.ranks) for _ in range(starts[rank], starts[rank + 1])]
    found: list[Arc] = []
    while number >= 0 and causes[number] >= 0:
        before = causes[number]
        if rank_of[before] == rank_of[number] and is_compute(cells[before]) and is_compute(cells[number]):
            found.append((rank_of[number], cells[before], cells[number]))
        number = before
    return found


def is_compute(code: int) -> bool:
    """True if a cell is one of F, I, W, B and OVERLAP_F_B."""
    kind = code >> 48
    return kind in (F, I, W, B) or kind == 12


def propose(candidate: Candidate, path: list[Arc], random: Random) -> Candidate | None:
    """Return a neighbour of a schedule, or None if the change that was drawn is not possible."""
    if candidate.lowering.gathers and random.random() < 0.05:
        return _other_lookahead(candidate, random)
    if random.random() < SHIFTS:
        return shift(candidate, random)
    rows = list(candidate.rows)
    changed: Row | None
    if path and random.random() < 0.75:
        rank, first, second = random.choice(path)
        changed = _on_path(rows[rank], first, second, candidate, random)
    else:
        rank = random.randrange(len(rows))
        changed = _anywhere(rows[rank], candidate, random)
    if changed is None or changed == rows[rank]:
        return None
    rows[rank] = changed
    return candidate._replace(rows=tuple(rows))


def _on_path(row: Row, first: int, second: int, candidate: Candidate, random: Random) -> Row | None:
    at = row.index(first)
    drawn = random.random()
    if drawn < 0.2 and first >> 48 == B:
        return _split(row, at, random)
    if drawn < 0.6:
        there = row.index(second)
        return moved(row, there, at - (0 if drawn < 0.4 else random.randrange(REACH)), candidate)
    return moved(row, at, at + 1 + (0 if drawn < 0.8 else random.randrange(REACH)), candidate)


def _anywhere(row: Row, candidate: Candidate, random: Random) -> Row | None:
    if not row:
        return None
    at = random.randrange(len(row))
    kind = row[at] >> 48
    if kind == B and random.random() < 0.2:
        return _split(row, at, random)
    if kind == I and random.random() < 0.2:
        return _merge(row, at)
    return moved(row, at, at + random.choice((-1, 1)) * random.randint(1, REACH), candidate)


def moved(row: Row, at: int, to: int, candidate: Candidate) -> Row:
    """Return the row with one action moved from ``at`` to ``to``, or as close as the order within the rank allows.

    The actions of one microbatch on one stage keep their order, since each needs the previous one. Inputs from other
    stages are left to the simulator.
    """
    to = min(max(to, 0), len(row) - 1)
    step = 1 if to > at else -1
    parts = candidate.frame.parts
    own = _subjects(row[at], parts)
    end = at
    while end != to and own.isdisjoint(_subjects(row[end + step], parts)):
        end += step
    rest = row[:at] + row[at + 1 :]
    return (*rest[:end], row[at], *rest[end:])


def _subjects(code: int, parts: Sequence[int]) -> set[tuple[int, int]]:
    """Return the stages and microbatches of a cell; nothing for an empty cell."""
    return {(stage, microbatch) for kind, stage, microbatch in parts_of(code, parts) if kind}


def _split(row: Row, at: int, random: Random) -> Row:
    """Replace the full backward at a place by I, and insert W some places later."""
    _, stage, microbatch = fields(row[at])
    later = min(len(row), at + 1 + random.randrange(REACH))
    weight = code_of(W, stage, microbatch)
    return (*row[:at], code_of(I, stage, microbatch), *row[at + 1 : later], weight, *row[later:])


def _merge(row: Row, at: int) -> Row:
    """Replace the I at a place and its W by a full backward at that place."""
    _, stage, microbatch = fields(row[at])
    rest = [code for code in row[at + 1 :] if code != code_of(W, stage, microbatch)]
    return (*row[:at], code_of(B, stage, microbatch), *rest)


def _other_lookahead(candidate: Candidate, random: Random) -> Candidate:
    """Change how many stages one rank gathers ahead."""
    lookahead = list(candidate.lowering.lookahead)
    rank = random.randrange(len(lookahead))
    lookahead[rank] = random.randint(1, WINDOW)
    return candidate._replace(lowering=candidate.lowering._replace(lookahead=tuple(lookahead)))
