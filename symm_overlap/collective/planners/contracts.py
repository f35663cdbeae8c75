"""What the ops of collective matmul promise, for `symm_overlap.plan.verify`: what their steps make, and their outputs.

In names, "product(r, x)" is what rank r's matmul makes of x, "sum" adds in the order given, and "total" in any order.

=====================  ============================================================================================
contract               output on rank r; x[s][u] is unit u of rank s's input
=====================  ============================================================================================
`ALL_GATHER`           "output": product(r, x[s][u]) and "gathered": x[s][u], for all s, and for each s all u
`ALL_GATHER_TOTAL`     "output": one unit, the total of product(r, x[s][u]), and "gathered" as above
`REDUCE_SCATTER`       "output": for each u of part r of the inputs, the sum of product(s, x[s][u]) over all s;
                       "product": product(r, x[r][u]) for all u
`ALL_REDUCE`           "output": for all u, the sum of product(s, x[s][u]) over all s
=====================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...plan import Contract, Plan, Region, Step, copied
from ...plan.values import Given, Input, Makes, Name, Names, inputs_of
from .kinds import ANNOUNCE, CONSUME, PRODUCE, PUBLISH, PULL, PUSH, REDUCE, TILES

_Chunk = tuple[int, int]


def _pulled(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
    """Copy the first region. A second one is where the first begins."""
    return copied(names, plan, step, [values for _, values in _without_offsets(names, plan, step, read)])


def _announced(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
    return [[names("offset", plan.rank)]]


def _without_offsets(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[tuple[Region, list[Name]]]:
    """Return the regions that a step reads, without those that say where the input of a peer begins.

    Raises:
        ValueError: the step reads the input of a peer that announces where it begins, but not the announcement, or the
            announcement of another.
    """
    each = list(zip(step.reads, read, strict=True))
    offsets = [values for region, values in each if region.buffer == "offset"]
    regions = [(region, values) for region, values in each if region.buffer != "offset"]
    if "offset" in plan.buffers:
        owners = [region.rank for region, _ in regions if region.buffer == "input" and region.rank != plan.rank]
        if offsets != [[names("offset", owner)] for owner in owners]:
            raise ValueError(f"it must read where the input begins of each of the ranks {owners}, and no other offset")
    return regions


def _multiplied(chunk_of: Callable[[Plan, int, int], _Chunk]) -> Makes:
    """Return what a matmul makes. ``chunk_of(plan, rank, unit)`` is the chunk of a unit of a rank's input."""

    def makes(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
        regions = _without_offsets(names, plan, step, read)
        parts = [part for region, values in regions if region not in step.writes for part in values]
        before = [value for region, values in regions if region in step.writes for value in values]
        if step.chunk is not None and parts:
            first = parts[0].words[0]
            if not isinstance(first, Input) or chunk_of(plan, first.region.rank, first.region.start) != step.chunk:
                raise ValueError(f"it computes chunk {step.chunk[0]}.{step.chunk[1]}, but reads {parts[0]}")
        products = [names("product", plan.rank, part) for part in parts]
        if before:
            products = [_total(names, [*_terms(before), *products])]
        return [products] * len(step.writes)

    return makes


def _terms(values: Sequence[Name]) -> list[Name]:
    """Return what was added up to ``values``."""
    return [
        term
        for value in values
        for term in (value.words[1:] if value.words[0] == "total" else [value])
        if isinstance(term, Name)
    ]


def _total(names: Names, terms: Sequence[Name]) -> Name:
    """Return the name of a sum whose order does not matter."""
    return terms[0] if len(terms) == 1 else names("total", *sorted(terms, key=lambda term: term.number))


def _summed(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
    return [[names("sum", *terms) for terms in zip(*read, strict=True)]] * len(step.writes)


def _steps(chunk_of: Callable[[Plan, int, int], _Chunk]) -> Mapping[str, Makes]:
    return {
        ANNOUNCE: _announced,
        **dict.fromkeys((PUBLISH, PULL, PUSH), _pulled),
        **dict.fromkeys((PRODUCE, CONSUME, TILES), _multiplied(chunk_of)),
        REDUCE: _summed,
    }


def _from_rank(plan: Plan, rank: int, unit: int) -> _Chunk:
    return rank, unit


def _for_rank(plan: Plan, rank: int, unit: int) -> _Chunk:
    owner, piece = divmod(unit, max(1, inputs_of(plan) // plan.world))
    return owner, piece


def _require(buffer: str, *outputs: str) -> None:
    if buffer not in outputs:
        raise ValueError(f"the join hands over {buffer!r}, but the outputs of the op are {' and '.join(outputs)}")


def _all_gather(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    parts = [given(rank, unit) for rank in range(plan.world) for unit in range(inputs_of(plan))]
    _require(buffer, "output", "gathered")
    return parts if buffer == "gathered" else [names("product", plan.rank, part) for part in parts]


def _all_gather_total(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    found = _all_gather(names, plan, buffer, given)
    return found if buffer == "gathered" else [_total(names, found)]


def _sums(names: Names, plan: Plan, units: range, given: Given) -> list[Name]:
    def sum_of(unit: int) -> Name:
        return names("sum", *(names("product", rank, given(rank, unit)) for rank in range(plan.world)))

    return [names.kept(("sum of", given(0, unit)), partial(sum_of, unit)) for unit in units]  # the same on all ranks


def _reduce_scatter(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    _require(buffer, "output", "product")
    if buffer == "product":
        return [names("product", plan.rank, given(plan.rank, unit)) for unit in range(inputs_of(plan))]
    share = inputs_of(plan) // plan.world
    return _sums(names, plan, range(plan.rank * share, (plan.rank + 1) * share), given)


def _all_reduce(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    _require(buffer, "output")
    return _sums(names, plan, range(inputs_of(plan)), given)


ALL_GATHER = Contract(_steps(_from_rank), _all_gather)
ALL_GATHER_TOTAL = Contract(_steps(_from_rank), _all_gather_total)
REDUCE_SCATTER = Contract(_steps(_for_rank), _reduce_scatter)
ALL_REDUCE = Contract(_steps(_for_rank), _all_reduce)
