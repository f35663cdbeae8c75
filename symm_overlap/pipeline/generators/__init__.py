"""Generators: pure functions from (ranks, microbatches, stages a rank) to a schedule that only computes.

One file for each family. `generate` finds them by name.
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
"""Every generator under its name, which is torch's where torch has the schedule."""

_OTHER_NAMES = {"zbv": "ZBVZeroBubble", "zb1p": "InterleavedZeroBubble"}

_FIXED = {"GPipe": 1, "1F1B": 1, "ZB-H1": 1, "ZB-H2": 1, "DualPipe": 2}
"""The stages a rank of the generators that do not take their number."""


def generate(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of a generator found by name: ``GENERATORS[name](ranks, microbatches, stages_per_rank)``.

    Args:
        name: a key of `GENERATORS`, "ZBV" or "ZB1P". Capitals, hyphens and underscores do not count.
        stages_per_rank: by default what the schedule has of its own; 2 for those that can have any number.

    Raises:
        TypeError, ValueError: there is no such generator, or it cannot make the schedule. The message says why, and
            which nearest arguments work.
    """
    found = _BY_PLAIN_NAME.get(_plain(name))
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
    """A name without what does not count in it."""
    return name.lower().replace("-", "").replace("_", "")


_BY_PLAIN_NAME = {_plain(name): name for name in GENERATORS} | _OTHER_NAMES
