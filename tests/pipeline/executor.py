"""A small machine that runs schedules in order, with given durations and messages that take no time.

It knows the dependencies of pipelines by itself: tests of generators stand on it and not on the package's own verifier.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Run:
    """What happened: for each rank [(start, end, action), ...]."""

    events: list

    @property
    def span(self):
        """The longest time between a rank's first start and its last end."""
        return max(rank[-1][1] - rank[0][0] for rank in self.events)

    @property
    def makespan(self):
        """When the last rank ends."""
        return max(rank[-1][1] for rank in self.events)

    def bubble(self, rank):
        """How long a rank is idle between its first start and its last end."""
        events = self.events[rank]
        return events[-1][1] - events[0][0] - sum(end - start for start, end, _ in events)


def run(schedule, forward=1, input_grad=1, weight_grad=1, overlapped=None):
    """Run every rank's actions in order, each as soon as its inputs are there. Fails where no rank can go on.

    A compound takes ``overlapped``, by default the sum of its parts.
    """
    cost = {"F": forward, "I": input_grad, "W": weight_grad, "B": input_grad + weight_grad}
    rows = [[action for action in row if action is not None] for row in schedule.rows]
    at, free = [0] * len(rows), [Fraction(0)] * len(rows)
    ends, events = {}, [[] for _ in rows]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                needs = [need for part in action.leaves for need in inputs(schedule, part)]
                if any(need not in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                length = sum(cost[part.kind] for part in action.leaves)
                end = start + (overlapped if action.parts and overlapped is not None else length)
                for part in action.leaves:
                    for result in results(part):
                        assert result not in ends, f"{part} runs twice"
                        ends[result] = end
                events[rank].append((start, end, action))
                free[rank] = end
                at[rank] += 1
                progress = True
    assert at == [len(row) for row in rows], [row[i] for row, i in zip(rows, at, strict=True) if i < len(row)]
    return Run(events)


def inputs(schedule, action):
    """What an action needs, as keys (stage, "F" or "I", microbatch)."""
    stage, microbatch = action.stage, action.microbatch
    per_pipeline = schedule.stages // schedule.pipelines
    if action.kind == "F":
        return [(stage - 1, "F", microbatch)] if stage % per_pipeline else []
    if action.kind == "W":
        return [(stage, "I", microbatch)]
    after = [(stage + 1, "I", microbatch)] if (stage + 1) % per_pipeline else []
    return [(stage, "F", microbatch), *after]


def results(action):
    """What an action makes, as keys."""
    kinds = ("I", "W") if action.kind == "B" else (action.kind,)
    return [(action.stage, kind, action.microbatch) for kind in kinds]


def peaks(schedule):
    """For each rank, the most activations of its stages that it keeps at once: from F to W (or B), ends included."""
    found = []
    for row in schedule.rows:
        alive = most = 0
        for action in row:
            if action is not None:
                alive += sum(part.kind == "F" for part in action.leaves)
                most = max(most, alive)
                alive -= sum(part.kind in "WB" for part in action.leaves)
        assert alive == 0
        found.append(most)
    return found
