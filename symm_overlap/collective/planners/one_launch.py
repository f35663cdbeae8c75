"""A plan with a kernel of several steps as it is issued: the kernel is one step."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan, Step
from ...plan.alike import operations
from .kinds import POLL, RAISE, TILES


def one_launch(plan: Plan) -> Plan:
    """``plan`` with all of its ``tiles`` launched at once, where the first of them stands.

    Inside the kernel, tiles wait for flags that ``raise`` steps raise, and ``poll`` steps wait for flags that tiles
    raise. As events these would put the kernel behind all copies, or the copies behind all of the kernel.
    """
    return _launched(plan)[0]


def issued(plan: Plan) -> list[int]:
    """How many operations the host issues for each step of a plan; of tiles, which are launched at once, for the first.

    The fork and the join are none, and yet count as one each, for the two with which a lane ends every call: its
    outputs become NaN if it has failed, and an event keeps the next call behind it. With a kernel there are three more:
    one begins its flags (`symm_overlap.kernels.stream_flags`), and at the end they are looked at, and told to the host.
    """
    launched, at = _launched(plan)
    counts, first = operations(launched), {place: index for index, place in reversed([*enumerate(at)])}
    found = [counts[place] if first[place] == index else 0 for index, place in enumerate(at)]
    if TILES in plan.kinds:
        found[0] += 1
        found[-1] += 2
    return found


def _launched(plan: Plan) -> tuple[Plan, list[int]]:
    """A plan with its tiles launched at once, and where each step of ``plan`` is in it."""
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
        after = {at[earlier] for earlier in step.after if not _by_flag(plan.steps[earlier], step)}
        if step.kind == TILES:
            kernel = len(steps)
            reads = tuple(region for tile in tiles for region in tile.reads)
            step = replace(step, reads=reads, writes=tuple(region for tile in tiles for region in tile.writes))
            step = replace(step, chunk=None, label="")
        if index and not after and step.stream not in ends:
            after = {0}  # without its flag it still comes after the fork
        if step.kind == "join":  # what it followed by way of a flag, it follows by itself now
            after |= {end for stream, end in ends.items() if stream != step.stream}
        at.append(len(steps))
        ends[step.stream] = len(steps)
        steps.append(replace(step, after=tuple(sorted(after))))
    return Plan(plan.op, plan.rank, plan.world, tuple(steps), plan.buffers), at


def _by_flag(earlier: Step, later: Step) -> bool:
    return (earlier.kind, later.kind) in ((RAISE, TILES), (TILES, POLL))
