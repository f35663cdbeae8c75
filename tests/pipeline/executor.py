"""A small machine that runs schedules in order, with given durations and messages that take no time.

It has its own rules for the dependencies of pipelines, so tests of generators do not rely on the package's verifier.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Run:
    """What each rank ran and when: [(start, end, action), ...] for each rank."""

    events: list

    @property
    def span(self):
        """The longest time between a rank's first start and its last end."""
        return max(rank[-1][1] - rank[0][0] for rank in self.events)

    @property
    def makespan(self):
        """The time at which the last rank ends."""
        return max(rank[-1][1] for rank in self.events)

    def bubble(self, rank):
        """Return how long a rank is idle between its first start and its last end."""
        events = self.events[rank]
        return events[-1][1] - events[0][0] - sum(end - start for start, end, _ in events)


def run(schedule, forward=1, input_grad=1, weight_grad=1, overlapped=None):
    """Run every rank's actions in order, each as soon as its inputs are there. Fail if no rank can go on.

    A compound takes the time ``overlapped``. By default, this is the sum of its parts.
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
    """Return what an action needs, as keys (stage, "F" or "I", microbatch)."""
    stage, microbatch = action.stage, action.microbatch
    per_pipeline = schedule.stages // schedule.pipelines
    if action.kind == "F":
        return [(stage - 1, "F", microbatch)] if stage % per_pipeline else []
    if action.kind == "W":
        return [(stage, "I", microbatch)]
    after = [(stage + 1, "I", microbatch)] if (stage + 1) % per_pipeline else []
    return [(stage, "F", microbatch), *after]


def results(action):
    """Return what an action computes, as keys (stage, kind, microbatch)."""
    kinds = ("I", "W") if action.kind == "B" else (action.kind,)
    return [(action.stage, kind, action.microbatch) for kind in kinds]


def peaks(schedule):
    """Return for each rank the most activations that it keeps at once. Each is kept from F to W (or B), inclusive."""
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
