"""Which plan carries out a choice: pure functions, for the exchange that runs the plan and the model that times it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..plan import Plan
from .planners.all_gather_consume import all_gather_consume
from .planners.gather_then_consume import gather_then_consume

if TYPE_CHECKING:
    from .choice import Choice
    from .problem import Problem

RING = 2
"""How many chunks of peers have memory when a weight is gathered: one is copied while the other is multiplied."""


def gather_plan(
    problem: Problem,
    choice: Choice,
    rank: int,
    *,
    in_place: bool,
    keep: bool,
    consume: bool,
    accumulate: bool,
    symmetric: bool = False,
    announce_offset: bool = True,
) -> Plan:
    """Return the plan of an all-gather. The arguments are those of `all_gather_consume`."""
    world = problem.world
    if choice.whole:
        return gather_then_consume(
            rank,
            world,
            in_place=in_place,
            keep=keep,
            consume=consume,
            symmetric=symmetric,
            announce_offset=announce_offset,
        )
    return all_gather_consume(
        rank,
        world,
        chunks=choice.chunks,
        compute=choice.compute,
        copy=choice.copy,
        copies=choice.copies,
        in_place=in_place,
        keep=keep,
        consume=consume,
        accumulate=accumulate,
        symmetric=symmetric,
        announce_offset=announce_offset,
        # If a signal is a kernel, the matmul of the local shard would delay it if the matmul were issued first.
        outbound=choice.copy if in_place else choice.compute[0],
        ring=RING if problem.op_kind.moves_weight else None,
    )


def reduction_plan(
    planner: Callable[..., Plan], choice: Choice, rank: int, world: int, *, in_place: bool, **arguments: bool
) -> Plan:
    """Return the plan of a reduction by ``planner``. Further arguments are the planner's own."""
    how: dict[str, Any] = {}
    if not choice.whole:
        how = {"chunks": choice.chunks, "compute": choice.compute, "copy": choice.copy, "copies": choice.copies}
    return planner(rank, world, in_place=in_place, **how, **arguments)
