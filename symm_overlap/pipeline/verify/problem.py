"""What the verifier reports: a problem, the actions that it is about, and their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..action import Action
from ..schedule import Schedule, where


class Place(NamedTuple):
    """An action in a schedule. Each part of a compound has a place of its own; they share the cell."""

    rank: int
    cell: int
    action: Action

    def __str__(self) -> str:
        return f"{where(self.rank, self.cell)}: {self.action}"


class Problem(NamedTuple):
    """Something that is wrong: its kind, the actions, and a description.

    Attributes:
        kind: "misplaced", "missing", "duplicated", "order", "unpaired", "crossed", "deadlock", "sharded", "resharded"
            or "unreduced".
    """

    kind: str
    places: tuple[Place, ...]
    text: str

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.text}", *(f"    {place}" for place in self.places)])


class Index:
    """Where each action of a schedule is.

    Attributes:
        schedule: the schedule.
        places: for each rank, the places of its actions in order. The parts of a compound follow one another.
        of: for each action, its places; more than one if it is duplicated.
        kinds: the kinds of actions that the schedule contains.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places: list[list[Place]] = []
        found: defaultdict[Action, list[Place]] = defaultdict(list)
        for rank, row in enumerate(schedule.rows):
            self.places.append([])
            for cell, action in enumerate(row):
                for leaf in () if action is None else action.leaves:
                    place = Place(rank, cell, leaf)
                    self.places[-1].append(place)
                    found[leaf].append(place)
        self.of: Mapping[Action, Sequence[Place]] = dict(found)
        self.kinds = {action.kind for action in found}

    def first(self, action: Action) -> Place | None:
        """Return the first place of an action, or None if there is none."""
        places = self.of.get(action)
        return places[0] if places else None
