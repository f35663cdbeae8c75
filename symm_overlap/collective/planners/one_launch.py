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
    tiles = [step for step in plan.steps if step.kind == TILES]
    steps: list[Step] = []
    at: list[int] = []  # of each step of the plan, its index in the new one
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
    return Plan(plan.op, plan.rank, plan.world, tuple(steps), plan.buffers)


def issued(plan: Plan) -> list[int]:
    """How many operations the host issues for each step of a plan whose tiles, if it has any, are launched at once."""
    counts, launched = [], False
    for step in plan.steps:
        events = [earlier for earlier in step.after if not _by_flag(plan.steps[earlier], step)]
        inside = step.kind == TILES and launched
        launched |= step.kind == TILES
        counts.append(0 if inside else operations(replace(step, after=tuple(events))))
    return counts


def _by_flag(earlier: Step, later: Step) -> bool:
    return (earlier.kind, later.kind) in ((RAISE, TILES), (TILES, POLL))
