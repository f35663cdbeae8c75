"""Random tables of actions for the tests of formats. They need not be valid schedules."""

import random

from symm_overlap.pipeline import Action, Schedule

from .test_action import some_action


def random_table(seed):
    """Return a schedule whose rows are random actions and empty cells in any order. Every rank has a stage."""
    source = random.Random(seed)
    ranks, stages_per_rank = source.randint(1, 5), source.randint(1, 3)
    rows = []
    for rank in range(ranks):
        stages = [rank + ranks * local for local in range(stages_per_rank)]
        row = [Action(stage, "F", source.randrange(9)) for stage in stages]
        for _ in range(source.randint(0, 12)):
            action = some_action(source)
            parts = tuple(part._replace(stage=source.choice(stages)) for part in action.parts)
            row.append(action._replace(parts=parts) if parts else action._replace(stage=source.choice(stages)))
        rows.append([source.choice([action, action, None]) for action in row[stages_per_rank:]])
        rows[-1] += row[:stages_per_rank]
        source.shuffle(rows[-1])
        rows[-1] += [None] * source.randint(0, 2)
    return Schedule.from_rows(rows)
