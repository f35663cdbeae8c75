"""Which plan carries out a choice: pure functions, for the exchange that runs the plan and the model that times it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...plan import Plan
from ..planners.all_gather_consume import all_gather_consume
from ..planners.fused_all_gather_matmul import fused_all_gather_matmul
from ..planners.fused_matmul_all_reduce import fused_matmul_all_reduce
from ..planners.fused_matmul_reduce_scatter import fused_matmul_reduce_scatter
from ..planners.gather_then_consume import gather_then_consume
from ..planners.produce_all_reduce import produce_all_reduce
from ..planners.produce_reduce_scatter import produce_reduce_scatter

if TYPE_CHECKING:
    from ..problem import Problem
    from .choice import Choice

RING = 2
"""How many chunks of peers have memory when a weight is gathered: one is copied while the other is multiplied."""

_FUSED: dict[tuple[bool, bool], Callable[..., Plan]] = {
    (True, False): fused_all_gather_matmul,
    (False, False): fused_matmul_reduce_scatter,
    (False, True): fused_matmul_all_reduce,
}
"""Indexed by whether inputs travel, and whether every rank gets the whole sum."""


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
        span=choice.span,
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
        how["span"] = choice.span
    return planner(rank, world, in_place=in_place, **how, **arguments)


def fused_plan(problem: Problem, choice: Choice, rank: int, **arguments: bool) -> Plan:
    """Return the plan of a call on the path "fused". Further arguments are the planner's own."""
    planner = _FUSED[problem.op_kind.gathers, problem.op_kind.replicates]
    streams = {"stream": choice.compute[0], "copy": choice.copy, "copies": choice.copies}
    return planner(rank, problem.world, chunks=choice.chunks, **streams, **arguments)


def planned(problem: Problem, choice: Choice, rank: int = 0) -> Plan:
    """Return a rank's plan for a call in chunks that needs nothing except its result."""
    op_kind = problem.op_kind
    if choice.path == "fused":
        return fused_plan(problem, choice, rank)
    if op_kind.gathers:
        multiplies = op_kind.multiplies
        accumulate = multiplies and problem.last and not op_kind.moves_weight
        return gather_plan(
            problem, choice, rank, in_place=False, keep=not multiplies, consume=multiplies, accumulate=accumulate
        )
    planner: Callable[..., Plan] = produce_all_reduce if op_kind.replicates else produce_reduce_scatter
    return reduction_plan(planner, choice, rank, problem.world, in_place=False)
