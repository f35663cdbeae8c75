"""Changes plans, and returns what `verify` then finds."""

from __future__ import annotations

from collections.abc import Callable

from symm_overlap.plan import Contract, Plan, Region, Step, verify

OWN = Region("input", 0, 0, 1)


def changed(plans: list[Plan], rank: int, changes: Callable[[Step], Step]) -> list[Plan]:
    """Return the plans with each step of one rank changed."""
    plan = plans[rank]
    steps = tuple(changes(step) for step in plan.steps)
    return [*plans[:rank], Plan(plan.op, rank, plan.world, steps, plan.buffers), *plans[rank + 1 :]]


def problem_of(plans: list[Plan], contract: Contract) -> str:
    """Return the first problem of two calls, which have none without a contract."""
    assert verify([plans] * 2).ok
    found = verify([plans] * 2, contracts=[contract] * 2).problems
    assert {problem.kind for problem in found} == {"wrong value"}
    return str(found[0])
