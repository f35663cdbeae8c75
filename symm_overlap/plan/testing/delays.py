"""Delays: pause at random before steps, to see interleavings that timing alone would not show."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ..execute import Table
from ..step import Step


def delayed(table: Table, seed: int, rank: int, longest: float = 1e-3) -> dict[str, Callable[[Step], object]]:
    """``table`` with a random pause before every step: a way to see interleavings that timing alone would not show.

    A pause depends on nothing but ``seed``, ``rank`` and the step; half of them are zero, so that some streams run
    far ahead.

    Args:
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
