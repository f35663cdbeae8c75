"""Pass: gather the parameters of a stage before they are used, and free them when other stages need the memory.

This is one rank with three stages, and a window of two::

    before   0F0 0F1 1F0 2F0 2B0 ...
    after    0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 2F0 2B0 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from ..action import RESHARD, UNSHARD, Action
from ..schedule import Row, Schedule

WINDOW = 3
"""The number of stages that are gathered at the same time: one for a forward, one for a backward, and one that is being
fetched. It is torch's default."""


def add_unshard_reshard(
    schedule: Schedule, window: int = WINDOW, lookahead: int | Sequence[int] | None = None
) -> Schedule:
    """Add UNSHARD before the first use of each stage, and RESHARD when it leaves the window. Empty cells are left out.

    The result equals that of ``_add_unshard_reshard`` of torch 2.15. It also equals that of torch 2.11 and 2.13 if
    these evict one stage at a time. If they evict several, their order is that of a set.

    Args:
        schedule: a schedule without UNSHARD and RESHARD.
        window: the number of different stages, counted from the next action on, that keep their parameters. If the
            window ends inside a compound, it includes all of the compound.
        lookahead: the number of different stages, counted in the same way, that are fetched: from 1 to ``window``,
            which is the default. It is one number, or one for each rank. Rank 0 starts at once, so it may fetch few
            stages, while later ranks have more time.

    Raises:
        ValueError: the schedule has UNSHARD or RESHARD already, a compound needs more stages than the window, or the
            window or the look-ahead is out of range.
    """
    ahead = [window] * schedule.ranks if lookahead is None else lookahead
    ahead = [ahead] * schedule.ranks if isinstance(ahead, int) else list(ahead)
    if window < 1 or len(ahead) != schedule.ranks or not all(1 <= each <= window for each in ahead):
        raise ValueError(
            f"expected a window of at least 1 and a look-ahead from 1 to the window, one or {schedule.ranks} of them, "
            f"and found {window} and {lookahead}"
        )
    return schedule.with_rows(_gathered(row, window, each) for row, each in zip(schedule.rows, ahead, strict=True))


def _gathered(row: Row, window: int, lookahead: int) -> list[Action]:
    """Return one row with its UNSHARD and RESHARD."""
    actions = [action for action in row if action is not None]
    active: dict[int, None] = {}  # in the order of their UNSHARD
    result: list[Action] = []
    resident = _next_stages(actions, window)
    fetched = resident if lookahead == window else _next_stages(actions, lookahead)
    before = None
    for action, keep, fetch in zip(actions, resident, fetched, strict=True):
        if action.kind in (UNSHARD, RESHARD):
            raise ValueError(f"the schedule has {action} already: remove all UNSHARD and RESHARD actions first")
        if len({leaf.stage for leaf in action.leaves}) > window:
            raise ValueError(f"{action} needs more stages than a window of {window} holds")
        if (keep, fetch) != before:
            before = keep, fetch
            for stage in [stage for stage in active if stage not in keep]:
                del active[stage]
                result.append(Action(stage, RESHARD))
            for stage in fetch:
                if stage not in active:
                    active[stage] = None
                    result.append(Action(stage, UNSHARD))
        result.append(action)
    return result + [Action(stage, RESHARD) for stage in active]


def _next_stages(actions: Sequence[Action], count: int) -> list[tuple[int, ...]]:
    """Return, for each action, the next ``count`` different stages from it on, in the order of their first use.

    The search runs from the end, so that each action takes time only for its own stages and for ``count`` others.
    """
    first_use: dict[int, int] = {}  # for each stage, the index of its next use; the soonest comes last
    found: list[tuple[int, ...]] = []
    for index in reversed(range(len(actions))):
        for leaf in reversed(actions[index].leaves):
            first_use.pop(leaf.stage, None)
            first_use[leaf.stage] = index
        stages: list[int] = []
        for stage in reversed(first_use):
            # If the window ends inside a compound, it includes all stages of the compound.
            if len(stages) >= count and first_use[stage] != first_use[stages[-1]]:
                break
            stages.append(stage)
        found.append(tuple(stages))
    return found[::-1]
