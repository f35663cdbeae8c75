"""Planners for an all-gather and a reduce-scatter in a ring of slots that outlive the call.

World size 3, rank 0. "publish" does nothing if the caller has already written the data into the slot::

    gather   publish, signal 2 1 | wait 1, pull 1 | wait 2, pull 2
    reduce   publish, signal 2 1 | wait 1 | wait 2 | reduce

Ranks meet once in a call, and no rank announces that it has finished reading. The next call implies it: in that call,
each rank signals only after its own reads of this one. So the data of call k may be overwritten once call k+1 is done
on this rank, and two slots are enough. A third slot lets the caller fill it while call k+1 is still in flight.
"""

from __future__ import annotations

from functools import lru_cache

from ...collective.planners.kinds import PUBLISH, PULL, REDUCE
from ...plan import Builder, Life, Plan, Region

STREAM = "caller"


@lru_cache(maxsize=256)
def gather_in_slot(rank: int, world: int, slot: int, *, outside: bool = False) -> Plan:
    """Return the plan of ``rank`` for an all-gather through a slot.

    Buffers: "input" 1 unit, this rank's own shard; "slots" ``world`` units per slot, the shards in rank order;
    "output" ``world`` units, the same, if the output is outside of the slots.

    Args:
        outside: whether the output is memory of the caller. Otherwise it is the slot.

    Raises:
        ValueError: the rank is not in the world.
    """
    buffers = {"input": Life.INPUT, "slots": Life.PERSISTENT, **({"output": Life.OUTPUT} if outside else {})}
    plan = Builder("gather_in_slot", rank, world, stream=STREAM, buffers=buffers, inputs={"input": 1})
    mine, first = plan.here("input", 0), slot * world
    output = plan.here("output", 0, world) if outside else plan.here("slots", first, world)
    plan.add(PUBLISH, STREAM, reads=[mine], writes=[plan.here("slots", first + rank)])
    peers = _announce(plan)
    if outside:
        plan.add(PULL, STREAM, reads=[mine], writes=[plan.here("output", rank)])
    for peer in peers:
        _await(plan, peer)
        source = Region("slots", peer, first + peer, first + peer + 1)
        target = plan.here(output.buffer, output.start + peer)
        plan.add(PULL, STREAM, reads=[source], writes=[target], peers=(peer,))
    return plan.finish(output)


@lru_cache(maxsize=256)
def reduce_in_slot(rank: int, world: int, slot: int, *, in_place: bool) -> Plan:
    """Return the plan of ``rank`` for a reduce-scatter whose input is a slot.

    Buffers: "input" ``world`` units, one part for each rank; "slots" ``world`` units per slot, the same parts; "stage"
    ``world`` units, copies of peers' parts, with this rank's own unit unused; "output" 1 unit.

    Args:
        in_place: whether the sum reads the peers' memory directly. Otherwise their parts are copied first.

    Raises:
        ValueError: the rank is not in the world.
    """
    buffers = {"input": Life.INPUT, "slots": Life.PERSISTENT, "stage": Life.SCRATCH, "output": Life.OUTPUT}
    plan = Builder("reduce_in_slot", rank, world, stream=STREAM, buffers=buffers, inputs={"input": world})
    parts = plan.here("slots", slot * world, world)
    plan.add(PUBLISH, STREAM, reads=[plan.here("input", 0, world)], writes=[parts])
    unit = slot * world + rank
    partials = {rank: plan.here("slots", unit)}
    for peer in _announce(plan):
        _await(plan, peer)
        partials[peer] = Region("slots", peer, unit, unit + 1)
        if not in_place:
            plan.add(PULL, STREAM, reads=[partials[peer]], writes=[plan.here("stage", peer)], peers=(peer,))
            partials[peer] = plan.here("stage", peer)
    plan.add(REDUCE, STREAM, reads=[partials[peer] for peer in range(world)], writes=[plan.here("output", 0)])
    return plan.finish(plan.here("output", 0))


def _announce(plan: Builder) -> list[int]:
    """Signal to every peer that this rank's part is ready, and return the order of reading.

    The peer that reads this rank's part first is signalled first.
    """
    peers = [(plan.rank + step) % plan.world for step in range(1, plan.world)]
    plan.signal(STREAM, peers[::-1], 0, label="[ready]")
    return peers


def _await(plan: Builder, peer: int) -> None:
    plan.wait(STREAM, [peer], 0, label="[ready]")
