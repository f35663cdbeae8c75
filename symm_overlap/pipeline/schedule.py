"""A pipeline schedule: for every rank the order of its actions, and for every stage the rank that holds it.

The same value is what generators make, passes lower, and the verifier, the simulators and the runtime read. It knows
nothing of torch or of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .action import Action

Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class Schedule:
    """One table of actions. Immutable; passes return new ones.

    The constructor trusts its arguments, since passes call it with tables that are right by construction. `from_rows`
    is for tables from elsewhere: it finds out what is left out, and checks.

    Attributes:
        rows: for each rank its actions in order; None is an empty cell, in which a generator lets the rank wait.
        placement: for each stage its rank.
        microbatches: how many there are, over all pipelines.
        pipelines: 1, or 2 where microbatches enter from both ends (DualPipe). The stages are then that many equal
            runs, each of which is a whole pipeline with a copy of the parameters, for an equal share of the
            microbatches.
    """

    rows: tuple[Row, ...]
    placement: tuple[int, ...]
    microbatches: int
    pipelines: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are, over all ranks and pipelines."""
        return len(self.placement)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.placement[stage]

    def previous(self, stage: int) -> int | None:
        """The stage whose output is the input of ``stage``; None for the first of a pipeline."""
        return stage - 1 if stage % (self.stages // self.pipelines) else None

    def following(self, stage: int) -> int | None:
        """The stage whose input is the output of ``stage``; None for the last of a pipeline."""
        return stage + 1 if (stage + 1) % (self.stages // self.pipelines) else None

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that a stage runs: all of them, or the share of its pipeline."""
        share = self.microbatches // self.pipelines
        pipeline = stage // (self.stages // self.pipelines)
        return range(pipeline * share, (pipeline + 1) * share)

    @cached_property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each rank its stages, in ascending order."""
        found: list[list[int]] = [[] for _ in self.rows]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def size(self) -> int:
        """How many actions there are; empty cells do not count, and a compound counts once."""
        return sum(action is not None for row in self.rows for action in row)

    def with_rows(self, rows: Iterable[Iterable[Action | None]]) -> Schedule:
        """The schedule of other rows on the same stages."""
        return Schedule(tuple(map(tuple, rows)), self.placement, self.microbatches, self.pipelines)

    @staticmethod
    def from_rows(
        rows: Sequence[Sequence[Action | None]],
        placement: Sequence[int] | None = None,
        microbatches: int | None = None,
        pipelines: int = 1,
    ) -> Schedule:
        """The schedule of a table from elsewhere.

        Args:
            rows: for each rank its actions, None for an empty cell.
            placement: for each stage its rank; by default the rank whose row has actions of the stage.
            microbatches: how many there are; by default one more than the highest in the table.
            pipelines: see the class.

        Raises:
            ValueError: no stage at all, a stage or a microbatch that cannot be, a stage on two ranks, a stage or a rank
                without actions where ``placement`` is left out. The message names row and cell, both counted from 1.
        """
        actual = _placement(rows) if placement is None else tuple(placement)
        if not actual:
            raise ValueError("the table has no actions: a schedule has at least one rank with one stage")
        last = max((leaf.microbatch or 0 for _, _, leaf in _leaves(rows)), default=0)
        schedule = Schedule(
            tuple(map(tuple, rows)), actual, last + 1 if microbatches is None else microbatches, pipelines
        )
        if pipelines < 1 or schedule.stages % pipelines or schedule.microbatches % pipelines:
            raise ValueError(
                f"{schedule.stages} stages and {schedule.microbatches} microbatches cannot be shared equally by "
                f"{pipelines} pipelines"
            )
        _check(schedule)
        return schedule


def where(row: int, cell: int) -> str:
    """How messages name a place in a table, whose indices count from 0: rows and cells count from 1, ranks from 0."""
    return f"row {row + 1} (rank {row}), cell {cell + 1}"


def _leaves(rows: Sequence[Sequence[Action | None]]) -> Iterable[tuple[int, int, Action]]:
    """Every action of a table that is not a compound, with its row and cell."""
    for index, row in enumerate(rows):
        for cell, action in enumerate(row):
            if action is not None:
                for leaf in action.leaves:
                    yield index, cell, leaf


def _placement(rows: Sequence[Sequence[Action | None]]) -> tuple[int, ...]:
    """For each stage the rank whose row has its actions."""
    found: dict[int, int] = {}
    for row, cell, leaf in _leaves(rows):
        if found.setdefault(leaf.stage, row) != row:
            raise ValueError(
                f"{where(row, cell)}: {leaf} is of stage {leaf.stage}, which row {found[leaf.stage] + 1} has too: "
                "all actions of a stage are on one rank"
            )
    for row in range(len(rows)):
        if row not in found.values():
            raise ValueError(f"row {row + 1} (rank {row}) has no actions: remove it, or give the rank a stage")
    for expected, stage in enumerate(sorted(found)):
        if stage != expected:
            raise ValueError(f"stage {expected} has no actions, but stage {stage} has: stages are counted from 0")
    return tuple(found[stage] for stage in range(len(found)))


def _check(schedule: Schedule) -> None:
    """Raise where an action has a stage that is not its rank's, or a microbatch that its stage does not run."""
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            raise ValueError(f"stage {stage} is placed on rank {rank}, but there are {schedule.ranks} rows")
    runs = [schedule.microbatches_of(stage) for stage in range(schedule.stages)]
    for row, cell, leaf in _leaves(schedule.rows):
        if not 0 <= leaf.stage < schedule.stages or schedule.placement[leaf.stage] != row:
            raise ValueError(
                f"{where(row, cell)}: expected an action of a stage that rank {row} holds, "
                f"which are {list(schedule.stages_of_ranks[row])}, and found {leaf}"
            )
        if leaf.microbatch is not None and leaf.microbatch not in runs[leaf.stage]:
            allowed = runs[leaf.stage]
            raise ValueError(
                f"{where(row, cell)}: expected a microbatch from {allowed.start} to {allowed.stop - 1}, which stage "
                f"{leaf.stage} runs, and found {leaf}"
            )
