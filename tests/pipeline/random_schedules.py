"""Random valid schedules, with any placement of stages and any order that the dependencies allow."""

from __future__ import annotations

import random

from symm_overlap.pipeline import Action, Schedule


def random_compute(seed: int, *, compounds: bool = False) -> Schedule:
    """Return a schedule of compute actions and random empty cells. Every rank has a stage. Some backwards are split.

    Args:
        compounds: sometimes join a forward and a backward that are ready on a rank at the same time.
    """
    source = random.Random(seed)
    ranks = source.randint(1, 5)
    stages = source.randint(ranks, 3 * ranks)
    placement = list(range(ranks)) + [source.randrange(ranks) for _ in range(stages - ranks)]
    source.shuffle(placement)
    microbatches = source.randint(1, 6)
    backwards = source.random() < 0.9
    rows: list[list[Action | None]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    ready = [Action(0, "F", microbatch) for microbatch in range(microbatches)]

    def run(action: Action) -> None:
        stage, kind, microbatch, _ = action
        ready.remove(action)
        done.add(action)
        if kind == "F" and stage + 1 < stages:
            ready.append(Action(stage + 1, "F", microbatch))
        backward = Action(stage, source.choice("IB"), microbatch)
        if kind == "F" and stage + 1 == stages and backwards:
            ready.append(backward)
        if kind in ("I", "B") and stage:
            ready.append(backward._replace(stage=stage - 1))
        if kind == "I":
            ready.append(Action(stage, "W", microbatch))

    while ready:
        action = source.choice(ready)
        row = rows[placement[action.stage]]
        row += [None] * source.choice([0, 0, 0, 1, 2])
        if compounds and action.kind in ("F", "I", "B"):
            others = ("I", "B") if action.kind == "F" else ("F",)
            partners = [
                other for other in ready if other.kind in others and placement[other.stage] == placement[action.stage]
            ]
            if partners and source.random() < 0.5:
                pair = sorted((action, source.choice(partners)), key=lambda part: part.kind != "F")
                row.append(Action(-1, "OVERLAP_F_B", None, tuple(pair)))
                for part in pair:
                    run(part)
                continue
        row.append(action)
        run(action)
    return Schedule(tuple(map(tuple, rows)), tuple(placement), microbatches)


def with_residency(schedule: Schedule, seed: int) -> Schedule:
    """Return the schedule with UNSHARD before each stage's first action, and RESHARD and REDUCE_GRAD after its last."""
    source = random.Random(seed)
    rows: list[list[Action | None]] = []
    for row in schedule.rows:
        new = list(row)
        for stage in {leaf.stage for action in row if action is not None for leaf in action.leaves}:
            of_stage = [cell for cell, action in enumerate(new) if _is_of(action, stage)]
            new.insert(source.randint(of_stage[-1] + 1, len(new)), Action(stage, "RESHARD"))
            if any(leaf.kind in "WB" for action in new if action is not None for leaf in action.leaves):
                new.insert(source.randint(of_stage[-1] + 1, len(new)), Action(stage, "REDUCE_GRAD"))
            new.insert(source.randint(0, of_stage[0]), Action(stage, "UNSHARD"))
        rows.append(new)
    return schedule.with_rows(rows)


def _is_of(action: Action | None, stage: int) -> bool:
    return action is not None and any(leaf.stage == stage for leaf in action.leaves)
