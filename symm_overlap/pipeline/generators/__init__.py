"""Generators: pure functions of (ranks, microbatches, stages a rank) that return a schedule of compute alone.

There is one file for each family. `generate` finds a generator by its name.
"""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from .controllable_memory import v_half, v_min
from .dualpipe import dualpipe, dualpipev
from .gpipe import gpipe
from .interleaved import interleaved_1f1b
from .looped_bfs import looped_bfs
from .one_f_one_b import one_f_one_b
from .zbv import zbv
from .zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

GENERATORS: dict[str, Callable[..., Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Interleaved1F1B": interleaved_1f1b,
    "LoopedBFS": looped_bfs,
    "ZB-H1": zb_h1,
    "ZB-H2": zb_h2,
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZBVZeroBubble": zbv,
    "V-Half": v_half,
    "V-Min": v_min,
    "DualPipe": dualpipe,
    "DualPipeV": dualpipev,
}
"""Every generator under its name. If torch has the schedule, it is torch's name."""

_OTHER_NAMES = {"zbv": "ZBVZeroBubble", "zb1p": "InterleavedZeroBubble"}

_FIXED = {"GPipe": 1, "1F1B": 1, "ZB-H1": 1, "ZB-H2": 1, "DualPipe": 2}
"""For each generator without the argument ``stages_per_rank``, the number of stages a rank."""


def generate(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Return the schedule of the generator with this name: ``GENERATORS[name](ranks, microbatches, stages_per_rank)``.

    Args:
        name: a key of `GENERATORS`, "ZBV" or "ZB1P". Case, hyphens and underscores are ignored.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        stages_per_rank: by default the number that the schedule requires, or 2 if it allows any number.

    Raises:
        TypeError, ValueError: there is no such generator, or it cannot create the schedule. The message says why, and
            names the nearest arguments that work.
    """
    found = _BY_PLAIN_NAME.get(_plain(name)) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"there is no schedule {name!r}: it is one of {', '.join(GENERATORS)}")
    if stages_per_rank is None:
        return GENERATORS[found](ranks, microbatches)
    if found not in _FIXED:
        return GENERATORS[found](ranks, microbatches, stages_per_rank)
    if stages_per_rank != _FIXED[found]:
        raise ValueError(
            f"{found}: a rank has {_FIXED[found]} of the stages, not {stages_per_rank}; the nearest that works is "
            f"stages_per_rank={_FIXED[found]}"
        )
    return GENERATORS[found](ranks, microbatches)


def _plain(name: str) -> str:
    """Return a name in lower case, without hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")


_BY_PLAIN_NAME = {_plain(name): name for name in GENERATORS} | _OTHER_NAMES
