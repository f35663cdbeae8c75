"""Values: prove that calls compute what their ops promise, by running the steps on names instead of numbers.

Every unit of every input gets its own name in each call. A step that copies passes names on. A step that computes makes
one name out of those that it reads, such as "product(1, input@0[2])": a product of rank 1 with unit 2 of rank 0. Two
values have the same name only if they were made in the same way. A `Contract` says what each kind of step makes, and
which names the join of a rank must find in each output.

If no two accesses race, every order of the steps gives the same names, so one order is enough. `verify` runs this after
all other checks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .order import At, Order, Problem
from .plan import Life, Plan
from .step import Region, Step

_ALL_CALLS = -1  # in place of a call's index, for memory that is the same in every call
_LONGEST = 160  # characters of a name in a text


class Input(NamedTuple):
    """The word of the name of a unit that the caller has filled."""

    region: Region
    call: int

    def __str__(self) -> str:
        return f"{self.region} of call {self.call}"


class Name:
    """The name of a value: a word, and what the value was made of. `Names` makes them; equal names are one object.

    Attributes:
        words: the word, and further names, or numbers that tell similar names apart.
        number: how many names were made before it.
    """

    __slots__ = ("number", "words")

    def __init__(self, number: int, words: tuple[object, ...]) -> None:
        self.number, self.words = number, words

    def __str__(self) -> str:
        word, *parts = self.words
        return f"{word}({', '.join(map(str, parts))})" if parts else str(word)


class Names:
    """All names of one proof: ``names("product", rank, name)`` returns the same object for the same words."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Name] = {}
        self._kept: dict[object, Name] = {}

    def __call__(self, *words: object) -> Name:
        name = self._known.get(words)
        if name is None:
            name = self._known[words] = Name(len(self._known), words)
        return name

    def kept(self, key: object, make: Callable[[], Name]) -> Name:
        """Return the name that ``make`` returned when it was first needed for this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


Makes = Callable[[Names, Plan, Step, list[list[Name]]], Sequence[Sequence[Name]]]
"""``makes(names, plan, step, read)``: what a step writes, one sequence for each of ``step.writes``. ``read`` has one
list for each of ``step.reads``. It raises ValueError with the reason if the step makes no sense."""

Given = Callable[[int, int], Name]
"""``given(rank, unit)``: the name of a unit of a rank's buffer "input"."""


@dataclass(frozen=True)
class Contract:
    """What an op promises.

    Attributes:
        makes: what each kind of step makes; kinds that touch no memory are left out.
        promises: ``promises(names, plan, buffer, given)`` returns the names that the join of ``plan`` must find in the
            region that it reads of ``buffer``, unit by unit. It raises ValueError if the op has no such output.
    """

    makes: Mapping[str, Makes]
    promises: Callable[[Names, Plan, str, Given], Sequence[Name]]


def inputs_of(plan: Plan) -> int:
    """Return how many units the buffer "input" of a plan has."""
    return plan.extents.get("input", 0)


def copied(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
    """What a step makes that copies its one region to each region that it writes."""
    if len(read) != 1:
        raise ValueError(f"a copy reads one region, and this one reads {len(read)}")
    return read * len(step.writes)


class _Memory:
    """The names of what is in the memory of all ranks."""

    def __init__(self, names: Names) -> None:
        self._units: dict[tuple[str, int, int, int], Name] = {}
        self._unknown = names("what was there before the first call")

    def read(self, region: Region, call: int, plan: Plan) -> list[Name]:
        return [self._units.get(place, self._unknown) for place in self._places(region, call, plan)]

    def write(self, region: Region, call: int, plan: Plan, values: Sequence[Name]) -> None:
        self._units.update(zip(self._places(region, call, plan), values, strict=True))

    @staticmethod
    def _places(region: Region, call: int, plan: Plan) -> list[tuple[str, int, int, int]]:
        memory = call if plan.buffers[region.buffer] is Life.CALL else _ALL_CALLS
        return [(region.buffer, memory, region.rank, unit) for unit in range(region.start, region.stop)]


def wrong_values(order: Order, contracts: Sequence[Contract]) -> Iterator[Problem]:
    """Yield what calls do not compute as they should. ``contracts`` has one contract for each call.

    The calls must have no other problem.
    """
    names = Names()
    memory = _Memory(names)
    for number in order.sequence:
        at = order.where[number]
        plan, step, contract = order.calls[at.call][at.rank], at.step, contracts[at.call]
        read = [memory.read(region, at.call, plan) for region in step.reads]
        try:
            if step.kind == "fork":
                made: Sequence[Sequence[Name]] = [_filled(names, at.call, region) for region in step.writes]
            elif step.kind == "join":
                yield from _other_outputs(order, at)
                given = partial(_given, names, at.call, "input")
                for region, found in zip(step.reads, read, strict=True):
                    yield from _broken(at, region, found, contract.promises(names, plan, region.buffer, given))
                continue
            else:
                made = _made(contract, names, plan, step, read)
        except ValueError as error:
            yield Problem("wrong value", (at,), str(error))
            return  # all later values may be wrong because of this step
        for region, values in zip(step.writes, made, strict=True):
            memory.write(region, at.call, plan, values)


def _filled(names: Names, call: int, region: Region) -> list[Name]:
    """Return the names of what the caller has filled."""
    return [_given(names, call, region.buffer, region.rank, unit) for unit in range(region.start, region.stop)]


def _given(names: Names, call: int, buffer: str, rank: int, unit: int) -> Name:
    return names(Input(Region(buffer, rank, unit, unit + 1), call))


def _made(contract: Contract, names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> Sequence[Sequence[Name]]:
    if not step.writes:
        return []
    makes = contract.makes.get(step.kind)
    if makes is None:
        raise ValueError(f"the contract does not say what a {step.kind} makes")
    made = makes(names, plan, step, read)
    if len(made) != len(step.writes):
        raise ValueError(f"it makes {len(made)} regions, but writes {len(step.writes)}")
    for region, values in zip(step.writes, made, strict=True):
        if len(values) != region.stop - region.start:
            raise ValueError(f"it makes {len(values)} units for {region}")
    return made


def _other_outputs(order: Order, at: At) -> Iterator[Problem]:
    """Yield that a join hands over other buffers than the join of rank 0, if it does."""
    first = {region.buffer for region in order.calls[at.call][0].steps[-1].reads}
    own = {region.buffer for region in at.step.reads}
    if own != first:
        texts = [" and ".join(sorted(each)) or "nothing" for each in (own, first)]
        yield Problem("wrong value", (at,), f"the join hands over {texts[0]}, but on rank 0 {texts[1]}")


def _broken(at: At, region: Region, found: list[Name], promised: Sequence[Name]) -> Iterator[Problem]:
    """Yield the first difference between what a join reads in a region and what the contract promises."""
    if len(found) != len(promised):
        text = f"the join hands over {region}, but the op promises {len(promised)} units of {region.buffer!r}"
        yield Problem("wrong value", (at,), text)
        return
    for unit, (one, other) in enumerate(zip(found, promised, strict=True), region.start):
        if one is not other:
            is_, should = (textwrap.shorten(str(name), _LONGEST, placeholder=" ...") for name in (one, other))
            place = Region(region.buffer, region.rank, unit, unit + 1)
            yield Problem("wrong value", (at,), f"{place} is {is_}, but should be {should}")
            return
