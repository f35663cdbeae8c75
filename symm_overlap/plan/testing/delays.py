"""Delays: random pauses before steps, to provoke interleavings that ordinary timing would not show."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ..execute import Table
from ..step import Step


def delayed(table: Table, seed: int, rank: int, longest: float = 1e-3) -> dict[str, Callable[[Step], object]]:
    """Return ``table`` with a random pause before every step, to provoke interleavings that timing would not show.

    A pause depends only on ``seed``, ``rank`` and the step. Half of the pauses are zero, so that some streams run far
    ahead.

    Args:
        table: the functions that run steps; see `symm_overlap.plan.execute`.
        longest: the longest pause, in seconds.
    """

    def late(function: Callable[[Step], object]) -> Callable[[Step], object]:
        def run(step: Step) -> object:
            pause = random.Random(f"{seed} {rank} {step}").uniform(-longest, longest)
            if pause > 0:
                time.sleep(pause)
            return function(step)

        return run

    return {kind: late(function) for kind, function in table.items()}
