"""Which parameters of a pipeline are tied, and where their copies are. See `tied`, which keeps the copies equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..schedule import Schedule
from .stage import Stage

Copies = Sequence[tuple[int, str]]
"""The copies of one parameter: (stage, name in its module) of each."""

_MOST_PARAMETERS = 1 << 14  # the most parameters that a stage may have


class Tie(NamedTuple):
    """One tied parameter.

    Attributes:
        ranks: the ranks that have a copy, in ascending order.
        owner: the rank of the lowest stage that has a copy.
        mine: the copies on this rank, each once, lowest stage first.
    """

    ranks: tuple[int, ...]
    owner: int
    mine: tuple[nn.Parameter, ...]


def numbered(schedule: Schedule, stages: Mapping[int, Stage], tied: Sequence[Copies]) -> dict[int, Copies]:
    """Return the copies of each tied parameter by its number, which all ranks that have a copy use.

    Args:
        stages: the stages of this rank.
        tied: for each parameter, its copies. Lists that share a copy are one list.

    Raises:
        ValueError: there is no such stage.
    """
    united = _united(schedule, tied)
    return {**dict(enumerate(united)), **_replicas(schedule, stages, united)}


def ties_of_rank(
    schedule: Schedule, stages: Mapping[int, Stage], numbered: Mapping[int, Copies], rank: int
) -> dict[int, Tie]:
    """Return the tied parameters of which this rank has copies, by their numbers."""
    named = {index: _parameters(stage) for index, stage in stages.items()}
    ties = {index: _tie(schedule, named, copies, rank) for index, copies in numbered.items()}
    mine = {index: tie for index, tie in ties.items() if rank in tie.ranks}
    known: dict[int, int] = {}
    for index, tie in mine.items():
        for copy in tie.mine:
            if (other := known.setdefault(id(copy), index)) != index:
                raise ValueError(
                    f"tied parameters {list(numbered[other])} and {list(numbered[index])} share a parameter on rank "
                    f"{rank}, under two names: put all copies of it into one list"
                )
    return mine


def _united(schedule: Schedule, tied: Sequence[Copies]) -> list[list[tuple[int, str]]]:
    """Return the lists of tied parameters. Lists that share a copy are united, and so are those of the replicas.

    If there are two pipelines, a parameter has a copy in the other one, which is equal to it too. Every rank gets the
    same lists in the same order.
    """
    each = schedule.stages // schedule.pipelines
    united: list[set[tuple[int, str]]] = []
    for copies in tied:
        for stage, _ in copies:
            if not 0 <= stage < schedule.stages:
                raise ValueError(f"tied parameters name stage {stage}, and there are stages 0 to {schedule.stages - 1}")
        found = {(copy, name) for stage, name in copies for copy in range(stage % each, schedule.stages, each)}
        for other in [other for other in united if other & found]:
            united.remove(other)
            found |= other
        if found:
            united.append(found)
    return [sorted(found) for found in united]


def _parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by their names. If the module is wrapped in DDP, a parameter also has the name
    that it had before.
    """
    named = dict(stage.module.named_parameters(remove_duplicate=False))
    if isinstance(stage.module, DistributedDataParallel):
        named = {**dict(stage.module.module.named_parameters(remove_duplicate=False)), **named}
    return named


def _tie(schedule: Schedule, named: Mapping[int, Mapping[str, nn.Parameter]], copies: Copies, rank: int) -> Tie:
    placed = sorted((stage, schedule.rank_of(stage), name) for stage, name in copies)
    mine: dict[int, nn.Parameter] = {}
    for stage, owner, name in placed:
        if owner == rank:
            found = named[stage].get(name)
            if found is None:
                raise ValueError(f"tied parameters name {name!r} of stage {stage}, which has no such parameter")
            mine[id(found)] = found
    shapes = {tuple(copy.shape) for copy in mine.values()}
    if len(shapes) > 1:
        raise ValueError(f"tied parameters {list(copies)} have shapes {sorted(shapes)}: these must be equal")
    ranks = tuple(sorted({owner for _, owner, _ in placed}))
    return Tie(ranks, placed[0][1], tuple(mine.values()))


def _replicas(schedule: Schedule, stages: Mapping[int, Stage], united: Sequence[Copies]) -> dict[int, Copies]:
    """Return the ties of the replicas: if there are two pipelines, every parameter has a copy in the other one.

    A rank only knows the parameters of its own stages. So each stage of a pipeline has a fixed range of numbers, after
    those of the lists in ``united``, whose parameters are left out. A parameter and its copy get the same number,
    although they are on different ranks.
    """
    found: dict[int, Copies] = {}
    start, taken = len(united), {copy for copies in united for copy in copies}
    each = schedule.stages // schedule.pipelines
    for stage in range(each) if schedule.pipelines > 1 else ():
        copies = range(stage, schedule.stages, each)
        names = next((_names(stages[copy]) for copy in copies if copy in stages), [])
        for number, name in enumerate(names):
            if (stage, name) in taken:
                continue
            found[start + stage * _MOST_PARAMETERS + number] = [(copy, name) for copy in copies]
    return found


def _names(stage: Stage) -> list[str]:
    return [name for name, _ in stage.module.named_parameters()]
