"""What the ops of collective matmul promise, for `symm_overlap.plan.verify`: what their steps make, and their outputs.

In names, "product(r, x)" is what rank r's matmul makes of x, "sum" adds in the order given, and "total" in any order.
With x[s][u] for unit u of rank s's input, rank r gets:

==========================  =======================================================================================
contract                    outputs
==========================  =======================================================================================
`ALL_GATHER`                "gathered": x[s][u], for all s, and for each s all u
`ALL_GATHER_MATMUL`         "output": product(r, x[s][u]), for all s and u; "gathered" may be an output too
`ALL_GATHER_MATMUL_TOTAL`   "output": one unit, the total of product(r, x[s][u]); "gathered" may be an output too
`MATMUL_REDUCE_SCATTER`     "output": for each u of part r of the inputs, the sum of product(s, x[s][u]) over all s;
                            "product" may be an output too: product(r, x[r][u]), for all u
`MATMUL_ALL_REDUCE`         "output": for all u, the sum of product(s, x[s][u]) over all s
==========================  =======================================================================================

A step is run by its ``chunk`` and ``peers`` as well as by its regions (see `planners.kinds`). Both must say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ...plan import Contract, Life, Plan, Region, Step, copied
from ...plan.values import Given, Input, Makes, Name, Names, inputs_of
from .flags import require_flags
from .kinds import ANNOUNCE, CONSUME, POLL, PRODUCE, PUBLISH, PULL, PUSH, RAISE, REDUCE, TILES


def _steps(gathers: bool) -> Mapping[str, Makes]:
    """Return what each kind of step makes.

    Args:
        gathers: the ranks gather their inputs. Otherwise each input has a part for every rank.
    """

    def moved(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
        """Copy the first region. A second one is where the first begins."""
        sources, _ = _operands(names, plan, step, read)
        made = copied(names, plan, step, [values for _, values in sources])
        source, target = step.reads[0], step.writes[0]
        peer = target.rank if step.kind == PUSH else source.rank
        if step.peers and step.peers != (peer,):
            raise ValueError(f"it copies from or to rank {peer}, and names {step.peers}")
        if step.chunk is not None and step.chunk != (peer, source.start % _pieces(plan, gathers)):
            raise ValueError(f"it copies {source} to {target}, and names another chunk")
        return made

    def multiplied(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
        """Multiply consecutive chunks from the one that the step names on, or all. An output that is read is added."""
        if step.kind == TILES:
            require_flags(plan, gathers)
        sources, sums = _operands(names, plan, step, read)
        values = [value for _, values in sources for value in values]
        if step.chunk is None:
            wanted = range(inputs_of(plan) * (plan.world if gathers else 1))
        else:
            if len(sources) != 1 or step.reads[0] != sources[0][0]:
                raise ValueError("a matmul of some chunks reads them first, as one region")
            first = step.chunk[0] * _pieces(plan, gathers) + step.chunk[1]
            wanted = range(first, first + len(values))
        if [_number(plan, value, gathers) for value in values] != list(wanted):
            named = "all chunks" if step.chunk is None else f"chunk {step.chunk_name()}"
            raise ValueError(f"it computes {named}, but reads {', '.join(map(str, values[:2]))}")
        products = [names("product", plan.rank, value) for value in values]
        if sums:
            products = [_total(names, [*_terms(sums), *products])]
        return [products] * len(step.writes)

    def flagged(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
        require_flags(plan, gathers)
        return []

    return {
        ANNOUNCE: _announced,
        **dict.fromkeys((RAISE, POLL), flagged),
        **dict.fromkeys((PUBLISH, PULL, PUSH), moved),
        **dict.fromkeys((PRODUCE, CONSUME, TILES), multiplied),
        REDUCE: _summed,
    }


def _pieces(plan: Plan, gathers: bool) -> int:
    """Return into how many units a rank's part of the input is cut."""
    return inputs_of(plan) if gathers else _share(plan)


def _share(plan: Plan) -> int:
    """Return how many units of an input are for each rank."""
    units, left = divmod(inputs_of(plan), plan.world)
    if units == 0:
        return 1  # the input is one unit, for all ranks
    if left:
        raise ValueError(f"the input has {inputs_of(plan)} units, which {plan.world} ranks cannot share equally")
    return units


def _number(plan: Plan, value: Name, gathers: bool) -> int:
    """Return the place of a value among all inputs of the matmuls of a rank, or -1 if it is none of them."""
    word = value.words[0]
    if not isinstance(word, Input):
        return -1
    owner, unit = word.region.rank, word.region.start
    return owner * inputs_of(plan) + unit if gathers else unit if owner == plan.rank else -1


def _announced(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
    return [[names("offset", plan.rank)]]


def _operands(
    names: Names, plan: Plan, step: Step, read: list[list[Name]]
) -> tuple[list[tuple[Region, list[Name]]], list[Name]]:
    """Return the regions that a step reads and does not write, and the values that it adds to.

    Regions that say where the input of a peer begins are left out.

    Raises:
        ValueError: the step reads the input of a peer that announces where it begins, but behind it not the
            announcement, or that of another peer.
    """
    sources, sums = [], []
    for region, values in zip(step.reads, read, strict=True):
        if region in step.writes:
            sums += values
        else:
            sources.append((region, values))
    if "offset" not in plan.buffers:
        return sources, sums
    count = sum(region.buffer != "offset" for region, _ in sources)
    sources, offsets = sources[:count], [values for _, values in sources[count:]]
    owners = [region.rank for region, _ in sources if region.buffer == "input" and region.rank != plan.rank]
    if offsets != [[names("offset", owner)] for owner in owners] or plan.buffers["offset"] is not Life.CALL:
        raise ValueError(f"behind the inputs of the ranks {owners}, it must read where each begins in this call")
    return sources, sums


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
    if len({len(values) for values in read}) != 1:
        raise ValueError("the regions that it adds have different lengths")
    return [[names("sum", *terms) for terms in zip(*read, strict=True)]] * len(step.writes)


def _require(buffer: str, *outputs: str) -> None:
    if buffer not in outputs:
        raise ValueError(f"the join hands over {buffer!r}, but the outputs of the op are {' and '.join(outputs)}")


def _all_gather(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    _require(buffer, "gathered")
    return [given(rank, unit) for rank in range(plan.world) for unit in range(inputs_of(plan))]


def _all_gather_matmul(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    _require(buffer, "output", "gathered")
    parts = _all_gather(names, plan, "gathered", given)
    return parts if buffer == "gathered" else [names("product", plan.rank, part) for part in parts]


def _all_gather_matmul_total(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    found = _all_gather_matmul(names, plan, buffer, given)
    return found if buffer == "gathered" else [_total(names, found)]


def _sums(names: Names, plan: Plan, units: range, given: Given) -> list[Name]:
    def sum_of(unit: int) -> Name:
        return names("sum", *(names("product", rank, given(rank, unit)) for rank in range(plan.world)))

    return [names.kept(("sum of", given(0, unit)), partial(sum_of, unit)) for unit in units]  # the same on all ranks


def _matmul_reduce_scatter(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    _require(buffer, "output", "product")
    if buffer == "product":
        return [names("product", plan.rank, given(plan.rank, unit)) for unit in range(inputs_of(plan))]
    share = _share(plan)
    return _sums(names, plan, range(plan.rank * share, (plan.rank + 1) * share), given)


def _matmul_all_reduce(names: Names, plan: Plan, buffer: str, given: Given) -> list[Name]:
    _require(buffer, "output")
    return _sums(names, plan, range(inputs_of(plan)), given)


ALL_GATHER = Contract(("gathered",), _steps(gathers=True), _all_gather)
ALL_GATHER_MATMUL = Contract(("output",), _steps(gathers=True), _all_gather_matmul)
ALL_GATHER_MATMUL_TOTAL = Contract(("output",), _steps(gathers=True), _all_gather_matmul_total)
MATMUL_REDUCE_SCATTER = Contract(("output",), _steps(gathers=False), _matmul_reduce_scatter)
MATMUL_ALL_REDUCE = Contract(("output",), _steps(gathers=False), _matmul_all_reduce)
