"""Checks of the arguments of generators. The error says why they do not work, and names the nearest that do."""

from __future__ import annotations

from collections.abc import Callable


def require(schedule: str, **sizes: int) -> None:
    """Raise unless every size is a positive integer. ``schedule`` is the name of the schedule for messages."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{schedule}: {name} must be an integer, not {size!r}")
        if size < 1:
            raise ValueError(f"{schedule}: {name} must be at least 1, not {size}; the nearest that works is 1")


def require_two_stages(schedule: str, stages_per_rank: int) -> None:
    """Raise unless a rank has two stages, one on each leg of the V."""
    if stages_per_rank != 2:
        raise ValueError(
            f"{schedule}: every rank has two stages, one on each leg of the V, not {stages_per_rank}; "
            "the nearest that works is stages_per_rank=2"
        )


def require_microbatches(schedule: str, microbatches: int, why: str, works: Callable[[int], bool]) -> None:
    """Raise unless ``works(microbatches)``. The message states the rule ``why``, and names the nearest that work."""
    if works(microbatches):
        return
    below = next((fewer for fewer in range(microbatches - 1, 0, -1) if works(fewer)), None)
    above = next(more for more in range(microbatches + 1, 2**62) if works(more))
    nearest = f"that works is {above}" if below is None else f"that work are {below} and {above}"
    raise ValueError(f"{schedule}: {why}; {microbatches} does not work; the nearest {nearest}")
