"""Changes of many actions at once: all forwards of a rank run one place later, all weight gradients four, and so on.

A schedule repeats a pattern for each microbatch. To shorten a step, the pattern must change: the depth of the warm-up,
or how far behind its backward each W runs. Changes of one action at a time do not get there, since each of them alone
makes the step longer.
"""

from __future__ import annotations

from random import Random

from ..simulation.activations import B, F, I, W
from ..simulation.encoded import code_of, fields
from .candidate import Candidate

FARTHEST = 6
"""The most places that actions move."""

Row = tuple[int, ...]


def shift(candidate: Candidate, random: Random) -> Candidate | None:
    """Move the actions of one kind by some places, on one rank or on all ranks up to it or from it on.

    The actions are of one stage of each rank or of all stages, and of all microbatches or of a range of them. Returns
    None for a schedule with compounds.
    """
    if len(candidate.frame.parts):
        return None
    ranks, microbatches = len(candidate.rows), candidate.frame.microbatches
    rank = random.randrange(ranks)
    which = random.choice((range(rank, rank + 1), range(rank + 1), range(rank, ranks)))
    kinds = random.choice(((F,), (I, B), (W,)))
    first, last = 0, microbatches
    if random.random() < 0.5:
        first, last = sorted((random.randrange(microbatches), random.randrange(microbatches)))
    turn = random.randrange(-1, len(candidate.frame.placement) // ranks)  # of the stages of a rank; -1: all
    places = random.choice((-1, 1)) * random.randint(1, FARTHEST)
    rows = list(candidate.rows)
    for each in which:
        stages = [stage for stage, on in enumerate(candidate.frame.placement) if on == each]
        chosen = stages if turn < 0 else stages[turn : turn + 1]
        rows[each] = _shifted(rows[each], kinds, chosen, range(first, last + 1), places)
    return candidate._replace(rows=tuple(rows))


def _shifted(row: Row, kinds: tuple[int, ...], stages: list[int], microbatches: range, places: int) -> Row:
    """Return the row with the actions of these kinds, stages and microbatches moved later or earlier by some places."""
    by = places + 0.5 if places > 0 else places - 0.5
    keys = []
    for index, code in enumerate(row):
        kind, stage, microbatch = fields(code)
        chosen = kind in kinds and stage in stages and microbatch in microbatches
        keys.append((index + by if chosen else float(index), index))
    return in_order(tuple(row[index] for _, index in sorted(keys)))


def in_order(row: Row) -> Row:
    """Return the row with each action that comes before what it needs of its own stage moved right after that."""
    there = set(row)
    done: set[int] = set()
    waiting: dict[int, int] = {}
    found: list[int] = []
    for code in row:
        kind, stage, microbatch = fields(code)
        needed: int | None = None
        if kind in (I, B):
            needed = code_of(F, stage, microbatch)
        elif kind == W:
            needed = code_of(I, stage, microbatch)
        if needed is not None and needed in there and needed not in done:
            waiting[needed] = code
            continue
        next_code: int | None = code
        while next_code is not None:
            found.append(next_code)
            done.add(next_code)
            next_code = waiting.pop(next_code, None)
    return tuple(found)
