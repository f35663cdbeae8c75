"""Plans of fused kernels in the form in which they are issued: all tiles of the kernel become one step."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan, Step
from ...plan.one_rank import operations
from .kinds import POLL, RAISE, TILES


def one_launch(plan: Plan) -> Plan:
    """Return ``plan`` with all of its ``tiles`` merged into one step, at the place of the first of them.

    Tiles wait inside the kernel for flags that ``raise`` steps set, and ``poll`` steps wait for flags that tiles set.
    These dependencies are dropped, because as events they would put the kernel after all copies, or the copies after
    the whole kernel.
    """
    return _launched(plan)[0]


def issued(plan: Plan) -> list[int]:
    """Return how many operations the host issues for each step of a plan.

    Tiles are launched at once, so their operations count for the first of them. The fork and the join issue nothing,
    but count as one operation each, for the two operations with which a lane ends every call: one sets the outputs to
    NaN if the call has failed, and one records an event that keeps the next call behind this one.
    """
    launched, at = _launched(plan)
    counts, first = operations(launched), {place: index for index, place in reversed([*enumerate(at)])}
    return [counts[place] if first[place] == index else 0 for index, place in enumerate(at)]


def _launched(plan: Plan) -> tuple[Plan, list[int]]:
    """Return a plan with its tiles merged into one step, and for each step of ``plan`` its index in the new plan."""
    if TILES not in plan.kinds:
        return plan, list(range(len(plan.steps)))
    tiles = [step for step in plan.steps if step.kind == TILES]
    steps: list[Step] = []
    at: list[int] = []
    ends: dict[str, int] = {}
    kernel = -1
    for index, step in enumerate(plan.steps):
        if step.kind == TILES and kernel >= 0:
            at.append(kernel)
            continue
        after = {at[earlier] for earlier in step.after if not by_flag(plan.steps[earlier], step)}
        if step.kind == TILES:
            kernel = len(steps)
            reads = tuple(region for tile in tiles for region in tile.reads)
            step = replace(step, reads=reads, writes=tuple(region for tile in tiles for region in tile.writes))
            step = replace(step, chunk=None, label="")
        if index and not after and step.stream not in ends:
            after = {0}  # a step that lost its flag dependency still comes after the fork
        if step.kind == "join":  # it followed some streams only through flags, so it follows them directly now
            after |= {end for stream, end in ends.items() if stream != step.stream}
        at.append(len(steps))
        ends[step.stream] = len(steps)
        steps.append(replace(step, after=tuple(sorted(after))))
    return Plan(plan.op, plan.rank, plan.world, tuple(steps), plan.buffers), at


def by_flag(earlier: Step, later: Step) -> bool:
    """True if these steps are ordered by a flag, and not by an event, where the later one comes after the earlier."""
    return (earlier.kind, later.kind) in ((RAISE, TILES), (TILES, POLL))
