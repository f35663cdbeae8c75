"""A pipeline schedule: for every rank the order of its actions, and for every stage the rank that holds it.

Generators return a `Schedule`, passes lower it, and the verifier, the simulators and the runtime read it. It does not
depend on torch or on tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .action import Action

Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class Schedule:
    """One table of actions. It is immutable, and passes return new ones.

    The constructor does not check its arguments, since passes call it with tables that are right by construction. For
    tables from elsewhere, use `from_rows`: it derives the arguments that are left out, and checks all of them.

    Attributes:
        rows: for each rank, its actions in order. None is an empty cell, in which a generator lets the rank wait.
        placement: for each stage, its rank.
        microbatches: the number of microbatches, over all pipelines.
        pipelines: 1, or 2 if microbatches enter from both ends (DualPipe). With 2, the first half of the stages is one
            whole pipeline and the second half is another. Each has a copy of the parameters, and runs an equal share of
            the microbatches.
    """

    rows: tuple[Row, ...]
    placement: tuple[int, ...]
    microbatches: int
    pipelines: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages, over all ranks and pipelines."""
        return len(self.placement)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return self.placement[stage]

    def previous_stage(self, stage: int) -> int | None:
        """Return the stage whose output is the input of ``stage``; None for the first stage of a pipeline."""
        return stage - 1 if stage % (self.stages // self.pipelines) else None

    def next_stage(self, stage: int) -> int | None:
        """Return the stage whose input is the output of ``stage``; None for the last stage of a pipeline."""
        return stage + 1 if (stage + 1) % (self.stages // self.pipelines) else None

    def microbatches_of(self, stage: int) -> range:
        """Return the microbatches that a stage runs: all of them, or the share of its pipeline."""
        share = self.microbatches // self.pipelines
        pipeline = stage // (self.stages // self.pipelines)
        return range(pipeline * share, (pipeline + 1) * share)

    @cached_property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, its stages in ascending order."""
        found: list[list[int]] = [[] for _ in self.rows]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def size(self) -> int:
        """The number of actions. Empty cells do not count, and a compound counts once."""
        return sum(action is not None for row in self.rows for action in row)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of all actions. A compound is replaced by its parts."""
        return frozenset(leaf.kind for _, _, leaf in _leaves(self.rows))

    def with_rows(self, rows: Iterable[Iterable[Action | None]]) -> Schedule:
        """Return a schedule with other rows, and the same placement, microbatches and pipelines. Nothing is checked."""
        return Schedule(tuple(map(tuple, rows)), self.placement, self.microbatches, self.pipelines)

    @staticmethod
    def from_rows(
        rows: Sequence[Sequence[Action | None]],
        placement: Sequence[int] | None = None,
        microbatches: int | None = None,
        pipelines: int = 1,
    ) -> Schedule:
        """Return the schedule of a table that comes from elsewhere, after checking it.

        Args:
            rows: for each rank, its actions; None for an empty cell.
            placement: for each stage, its rank; by default the rank whose row has actions of the stage.
            microbatches: how many there are; by default one more than the highest in the table.
            pipelines: see the class.

        Raises:
            ValueError: there is no stage at all, a stage or a microbatch is out of range, or a stage is on two ranks.
                If ``placement`` is left out, also: a stage or a rank has no actions. The message names the row and the
                cell, both counted from 1.
        """
        actual = _placement(rows) if placement is None else tuple(placement)
        if not actual:
            raise ValueError("the table has no actions: a schedule has at least one rank with one stage")
        last = max((leaf.microbatch or 0 for _, _, leaf in _leaves(rows)), default=0)
        schedule = Schedule(
            tuple(map(tuple, rows)), actual, last + 1 if microbatches is None else microbatches, pipelines
        )
        require_equal_shares(schedule)
        _check(schedule)
        return schedule


def require_equal_shares(schedule: Schedule) -> None:
    """Raise ValueError if the pipelines of a schedule do not have equal shares of its stages and microbatches."""
    stages, microbatches, pipelines = schedule.stages, schedule.microbatches, schedule.pipelines
    if pipelines < 1 or stages % pipelines or microbatches % pipelines:
        raise ValueError(
            f"{stages} stages and {microbatches} microbatches cannot be shared equally by {pipelines} pipelines"
        )


def where(row: int, cell: int) -> str:
    """Return the name of a place in a table, for messages. It counts rows and cells from 1, and ranks from 0.

    The arguments count from 0.
    """
    return f"row {row + 1} (rank {row}), cell {cell + 1}"


def _leaves(rows: Sequence[Sequence[Action | None]]) -> Iterable[tuple[int, int, Action]]:
    """Yield (row, cell, action) for every action of a table. A compound is replaced by its parts."""
    for index, row in enumerate(rows):
        for cell, action in enumerate(row):
            if action is not None:
                for leaf in action.leaves:
                    yield index, cell, leaf


def _placement(rows: Sequence[Sequence[Action | None]]) -> tuple[int, ...]:
    """Return, for each stage, the rank whose row has its actions."""
    found: dict[int, int] = {}
    for row, cell, leaf in _leaves(rows):
        if found.setdefault(leaf.stage, row) != row:
            raise ValueError(
                f"{where(row, cell)}: {leaf} is of stage {leaf.stage}, which row {found[leaf.stage] + 1} has too: "
                "all actions of a stage must be on one rank"
            )
    for row in range(len(rows)):
        if row not in found.values():
            raise ValueError(f"row {row + 1} (rank {row}) has no actions: remove it, or give the rank a stage")
    for expected, stage in enumerate(sorted(found)):
        if stage != expected:
            raise ValueError(f"stage {expected} has no actions, but stage {stage} has: stages are counted from 0")
    return tuple(found[stage] for stage in range(len(found)))


def _check(schedule: Schedule) -> None:
    """Raise ValueError if an action has a stage that its rank does not hold, or a microbatch that its stage does not
    run."""
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
