"""Values: prove that calls compute what their ops promise, by running the steps on names instead of numbers.

Every unit of every input gets its own name in each call. A step that copies passes names on. A step that computes makes
one name out of those that it reads, such as "product(1, input@0[2])": a product of rank 1 with unit 2 of rank 0. Two
values have the same name only if they were made in the same way. A `Contract` says what each kind of step makes, and
which names the join of a rank must find in each output.

If no two accesses race, every order of the steps gives the same names, so one order is enough. `verify` runs this after
all other checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        return self.text(_LONGEST)

    def text(self, room: int) -> str:
        """Return the name in at most ``room`` characters, and a few. A name may stand for a huge tree of names."""
        word, *parts = self.words
        text = str(word)
        for number, part in enumerate(parts):
            text += ", " if number else "("
            left = room - len(text)
            if left <= 0:
                return f"{text}..."
            text += part.text(left) if isinstance(part, Name) else str(part)
        return f"{text})" if parts else text


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
        outputs: the buffers that the join of every rank hands over. It may hand over others for which there is a
            promise. Each is one region, and outputs begin with their first unit.
        makes: what each kind of step makes; kinds that write nothing may be left out.
        promises: ``promises(names, plan, buffer, given)`` returns the names that the join of ``plan`` must find in
            ``buffer``, unit by unit. It raises ValueError if the op has no such output.
    """

    outputs: Collection[str]
    makes: Mapping[str, Makes]
    promises: Callable[[Names, Plan, str, Given], Sequence[Name]]


def inputs_of(plan: Plan) -> int:
    """Return how many units the buffer "input" of a plan has."""
    return plan.extents.get("input", 0)


def copied(names: Names, plan: Plan, step: Step, read: list[list[Name]]) -> list[list[Name]]:
    """What a step makes that copies the one region that it reads to the one that it writes."""
    if len(read) != 1 or len(step.writes) != 1:
        raise ValueError(f"a copy has one source and one target, and this one has {len(read)} and {len(step.writes)}")
    return read


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
    arrivals = {number for numbers in order.arrivals.values() for number in numbers}
    for number in order.sequence:
        if number in arrivals:  # such a step is done when it leaves, which has a number of its own
            continue
        at = order.where[number]
        plan, step, contract = order.calls[at.call][at.rank], at.step, contracts[at.call]
        read = [memory.read(region, at.call, plan) for region in step.reads]
        try:
            if step.kind == "fork":
                made: Sequence[Sequence[Name]] = [_filled(names, at.call, region) for region in step.writes]
            elif step.kind == "join":
                yield from _missing_outputs(contract, at)
                given = partial(_given, names, at.call, "input")
                for region, found in zip(step.reads, read, strict=True):
                    life, promised = plan.buffers[region.buffer], contract.promises(names, plan, region.buffer, given)
                    yield from _broken(at, region, life, found, promised)
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
    makes = contract.makes.get(step.kind)
    if makes is None:
        if step.writes:
            raise ValueError(f"the contract does not say what a {step.kind} makes")
        return []
    made = makes(names, plan, step, read)
    if len(made) != len(step.writes):
        raise ValueError(f"it makes {len(made)} regions, but writes {len(step.writes)}")
    for region, values in zip(step.writes, made, strict=True):
        if len(values) != region.stop - region.start:
            raise ValueError(f"it makes {len(values)} units for {region}")
    return made


def _missing_outputs(contract: Contract, at: At) -> Iterator[Problem]:
    handed_over = {region.buffer for region in at.step.reads}
    for buffer in sorted(set(contract.outputs) - handed_over):
        yield Problem("wrong value", (at,), f"the join does not hand over {buffer!r}, which is an output of the op")


def _broken(at: At, region: Region, life: Life, found: list[Name], promised: Sequence[Name]) -> Iterator[Problem]:
    """Yield the first difference between what a join reads in a region and what the contract promises."""
    if len(found) != len(promised) or (life is Life.OUTPUT and region.start):
        text = f"the join hands over {region}, but the op promises units 0 to {len(promised)} of {region.buffer!r}"
        yield Problem("wrong value", (at,), text)
        return
    for unit, (one, other) in enumerate(zip(found, promised, strict=True), region.start):
        if one is not other:
            place = Region(region.buffer, region.rank, unit, unit + 1)
            yield Problem("wrong value", (at,), f"{place} is {one}, but should be {other}")
            return
