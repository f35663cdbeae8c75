"""The planners, and the streams and options with which their plans are tested."""

from symm_overlap.collective.planners import (
    ALL_GATHER,
    ALL_GATHER_MATMUL,
    ALL_GATHER_MATMUL_TOTAL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    all_gather_consume,
    gather_then_consume,
    one_shot_all_reduce,
    produce_all_reduce,
    produce_reduce_scatter,
    produce_then_all_reduce,
    produce_then_reduce_scatter,
)
from symm_overlap.plan import kind

TWO = ("compute0", "compute1")
OVERLAPPED = [all_gather_consume, produce_reduce_scatter, produce_all_reduce]
SEQUENTIAL = [gather_then_consume, produce_then_reduce_scatter, produce_then_all_reduce, one_shot_all_reduce]
REDUCERS = [produce_reduce_scatter, produce_all_reduce]
STREAMS = [
    {"copy": "compute0"},
    {"copy": "compute0", "in_place": True},
    {"copy": "copy"},
    {"copy": "copy", "compute": TWO},
    {"copy": "copy", "compute": TWO, "in_place": True},
    {"copy": "copy", "copies": 2},
    {"copy": "copy", "compute": TWO, "copies": 2},
]


def contracts_of(calls, accumulate=False):
    """Return the contract of each call, by the name of its op."""

    def contract_of(plan):
        if "gather" not in plan.op:
            return MATMUL_ALL_REDUCE if "all_reduce" in plan.op else MATMUL_REDUCE_SCATTER
        if "output" not in plan.buffers:
            return ALL_GATHER
        return ALL_GATHER_MATMUL_TOTAL if accumulate else ALL_GATHER_MATMUL

    return [contract_of(plans[0]) for plans in calls]


def in_graphs(calls):
    """True if calls may be captured in CUDA graphs. They may not if steps compute in peers' memory, as on CPU."""
    steps = [(plan.rank, step) for plans in calls for plan in plans for step in plan.steps]
    return all(
        region.rank == rank for rank, step in steps if kind(step.kind).role == "compute" for region in step.reads
    )


def delays_copy(taken):
    """True if a synchronisation lets the second copy stream start after the first copy, for speed alone."""
    return taken.kind == "dependency" and {at.step.kind for at in taken.at} in ({"pull"}, {"push"})


def case_id(value):
    if isinstance(value, dict):
        return "-".join(f"{key}={len(each) if key == 'compute' else each}" for key, each in value.items()) or "plain"
    return getattr(value, "__name__", None)
