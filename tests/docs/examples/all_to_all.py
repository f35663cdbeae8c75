"""Planner of an all-to-all: every rank has a part for every rank, and pulls the parts that are meant for itself.

World size 3, rank 0::

    compute0  publish, signal 2 1 | pull 0 | wait 1, pull 1 | wait 2, pull 2
"""

from __future__ import annotations

from functools import lru_cache

from symm_overlap.collective.planners.builder import CollectiveBuilder
from symm_overlap.collective.planners.kinds import PUBLISH, PULL
from symm_overlap.plan import Contract, Life, Plan, Region, copied

BUFFERS = {"input": Life.INPUT, "workspace": Life.CALL, "output": Life.OUTPUT}

# Both kinds of steps copy, and the output of a rank is what every rank has for it.
ALL_TO_ALL = Contract(
    ["output"],
    dict.fromkeys((PUBLISH, PULL), copied),
    lambda names, plan, buffer, given: [given(sender, plan.rank) for sender in range(plan.world)],
)


@lru_cache(maxsize=4096)
def all_to_all(rank: int, world: int, *, stream: str = "compute0") -> Plan:
    """Return the plan of ``rank``. Part p of the input of rank r becomes part r of the output of rank p.

    Args:
        stream: the caller's stream, which runs all steps.

    Each buffer has ``world`` parts. In "input" and "workspace" they are ordered by the rank that receives a part, and
    in "output" by the rank that sent it.

    Raises:
        ValueError: the rank is not in the world.
    """
    plan = CollectiveBuilder("all_to_all", rank, world, 1, (stream,), stream, buffers=BUFFERS, inputs=world)
    if world > 1:
        source, target = (plan.here(name, 0, world) for name in ("input", "workspace"))
        plan.add(PUBLISH, stream, reads=[source], writes=[target])
    # The peer that pulls first is signalled first.
    plan.signal(stream, plan.peers[::-1], 0, chunk=(rank, 0), label="[ready]")
    plan.pull((rank, 0), plan.here("output", rank), plan.here("input", rank))
    for peer in plan.peers:
        plan.wait(stream, [peer], 0, chunk=(peer, 0), label="[ready]")
        plan.pull((peer, 0), plan.here("output", peer), Region("workspace", peer, rank, rank + 1))
    return plan.finish(plan.here("output", 0, world))
