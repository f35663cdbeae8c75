"""Check each plan, and each of its steps, by itself: whether a plan makes sense before its order is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .kinds import find
from .order import At, Problem
from .plan import Life, Plan
from .step import Region, Step

_SOUND = "verify: no step is malformed"
"""A key of `Plan.derived`. It is set once the steps of a plan are checked, so that this is not repeated in every call.
"""


def malformed(call: int, plans: Sequence[Plan]) -> Iterator[Problem]:
    """Yield what is wrong with the plans of all ranks of one call, each by itself."""
    lives: dict[str, Life] = {}
    for rank, plan in enumerate(plans):
        for buffer, life in plan.buffers.items():
            if lives.setdefault(buffer, life) is not life:
                text = f"call {call}: buffer {buffer!r} is {life} on rank {rank} and {lives[buffer]} on a lower rank"
                yield Problem("malformed", (), text)
        if (plan.rank, plan.world) != (rank, len(plans)):
            text = f"call {call}: plan {rank} of {len(plans)} is for rank {plan.rank} of world size {plan.world}"
            yield Problem("malformed", (), text)
            continue
        if _SOUND not in plan.derived:
            errors = [
                (index, text) for index, step in enumerate(plan.steps) for text in _step_errors(plan, index, step)
            ]
            for index, text in errors:
                yield Problem("malformed", (At(call, rank, index, plan.steps[index]),), text)
            if not errors:
                plan.derived[_SOUND] = True
        ends = [(step.kind, step.stream) for step in plan.steps[:1] + plan.steps[-1:]]
        inner = {step.kind for step in plan.steps[1:-1]}
        if [kind for kind, _ in ends] != ["fork", "join"] or ends[0][1] != ends[1][1] or inner & {"fork", "join"}:
            yield Problem(
                "malformed", (), f"call {call}, rank {rank}: the plan must run from one fork to one join on its stream"
            )


def _step_errors(plan: Plan, index: int, step: Step) -> Iterator[str]:
    record = find(step.kind)
    if record is None:
        yield f"kind {step.kind!r} is not registered"
        return
    if not all(0 <= earlier < index and plan.steps[earlier].stream != step.stream for earlier in step.after):
        yield f"after is {step.after}: it may name only earlier steps of other streams"
    if record.meets in ("posts", "awaits"):
        yield from _peer_errors(plan, step, moves_data=record.memory)
    if record.meets and (step.channel is None or step.channel < 0):
        yield f"channel is {step.channel}: name a channel, from 0 on"
    if not record.memory and (step.reads or step.writes):
        yield f"a {step.kind} may not read or write memory, but it names reads or writes"
    for region in step.reads + step.writes:
        yield from _region_errors(plan, region)


def _peer_errors(plan: Plan, step: Step, moves_data: bool) -> Iterator[str]:
    others = set(range(plan.world)) - {plan.rank}
    if not step.peers or len(set(step.peers) & others) < len(step.peers):
        yield f"peers are {step.peers}: name other ranks of 0..{plan.world - 1}, each once"
    elif moves_data and len(step.peers) > 1:
        yield f"peers are {step.peers}: a {step.kind} moves data to or from exactly one peer"


def _region_errors(plan: Plan, region: Region) -> Iterator[str]:
    life = plan.buffers.get(region.buffer)
    if region.rank not in range(plan.world) or not 0 <= region.start < region.stop:
        yield f"no such region: {region}: its rank must be in the world, and it must have at least one unit, from 0 on"
    if life is None:
        yield f"{region} is in a buffer that the plan does not declare: it declares {', '.join(plan.buffers) or 'none'}"
    if life is Life.SCRATCH and region.rank != plan.rank:
        yield f"{region} is scratch memory, which only rank {region.rank} itself can touch"
