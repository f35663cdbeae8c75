"""Find synchronisation that calls do not need: remove each one in turn, and check whether `verify` still passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..kinds import kind
from ..order import At, Calls
from ..plan import Plan
from ..step import Step
from ..verify import find_problems


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """A barrier (its step on every rank), a signal with its wait, or one dependency: step ``at[0]`` on step ``at[1]``.

    If a signal or a wait has several peers, only the peer that the other step is on is removed from it.

    A pair of steps that also moves data, such as a send and its receive, does not count, because it is needed for the
    data. One synchronisation stands for the same place in every call of the same op.
    """

    kind: str
    at: tuple[At, ...]

    def __str__(self) -> str:
        if self.kind == "barrier":
            return str(self.at[0].step)
        joint = "meets" if self.kind == "signal" else "after"
        return f"rank {self.at[0].rank}: {self.at[0].step}, {joint} rank {self.at[1].rank}: {self.at[1].step}"


def redundant(calls: Calls, ranks: Sequence[int] | None = None, *, graphs: bool = False) -> list[Synchronisation]:
    """Return the synchronisations of ``calls`` that could each be left out.

    It may be impossible to leave out two of them together: each may be redundant only because the other is there.

    Args:
        calls: for each call, the plans of all ranks; calls of the same op must come from the same planner arguments.
        ranks: look only at what these ranks wait for. If all ranks do the same except for their number, one rank is
            enough.
        graphs: whether the calls may be captured in CUDA graphs. A ring of ranks deadlocks only if every rank in it can
            get stuck. So a dependency is then removed from every rank's plan, and all ranks must do the same except for
            their number.
    """
    return [
        each
        for each in synchronisations(calls, ranks)
        if next(find_problems(without(calls, each, everywhere=graphs), graphs=graphs), None) is None
    ]


def _meets(step: Step) -> str:
    """Return how a step synchronises with other ranks; see ``meets`` of `Kind`."""
    return kind(step.kind).meets


def synchronisations(calls: Calls, ranks: Sequence[int] | None = None) -> Iterator[Synchronisation]:
    """Yield every synchronisation of the first call of each op."""
    seen: set[str] = set()
    for call, plans in enumerate(calls):
        if not plans or plans[0].op in seen:
            continue
        seen.add(plans[0].op)
        chosen = range(len(plans)) if ranks is None else ranks
        signals: defaultdict[tuple[int, int, int | None], list[At]] = defaultdict(list)
        barriers: defaultdict[tuple[int, int | None], list[At]] = defaultdict(list)
        steps = [At(call, plan.rank, index, step) for plan in plans for index, step in enumerate(plan.steps)]
        for at in steps:
            if _meets(at.step) == "posts":
                for peer in at.step.peers:
                    signals[at.rank, peer, at.step.channel].append(at)
            elif _meets(at.step) == "everyone":
                barriers[at.rank, at.step.channel].append(at)
        for at in steps:
            if at.rank not in chosen:
                continue
            if _meets(at.step) == "awaits":
                for peer in at.step.peers:
                    signal = signals[peer, at.rank, at.step.channel].pop(0)
                    if not (kind(signal.step.kind).memory or kind(at.step.kind).memory):
                        yield Synchronisation("signal", (signal, at))
            elif _meets(at.step) == "everyone" and at.rank == chosen[0]:
                turn = barriers[at.rank, at.step.channel].index(at)
                yield Synchronisation("barrier", tuple(barriers[plan.rank, at.step.channel][turn] for plan in plans))
            for earlier in at.step.after:
                yield Synchronisation("dependency", (at, At(call, at.rank, earlier, plans[at.rank].steps[earlier])))


def without(calls: Calls, taken: Synchronisation, *, everywhere: bool = False) -> list[list[Plan]]:
    """Return ``calls`` with a synchronisation removed from every call of its op.

    A dependency is removed from the plan of its rank, or from the plans of all ranks with ``everywhere``. A step that
    is removed, or has no peers left, becomes a sleep: it keeps its place and its dependencies, but orders nothing
    between ranks.
    """
    op = calls[taken.at[0].call][0].op
    at_rank = {at.rank: at for at in taken.at}

    def edited(plan: Plan) -> Plan:
        if taken.kind == "dependency":
            return _without_dependency(plan, taken.at[0].index, taken.at[1].index)
        at = at_rank[plan.rank]
        if taken.kind == "signal" and len(at.step.peers) > 1:
            (other,) = at_rank.keys() - {at.rank}
            return _with(plan, at.index, replace(at.step, peers=tuple(peer for peer in at.step.peers if peer != other)))
        return _with(plan, at.index, Step("sleep", at.step.stream, after=at.step.after))

    known: dict[int, Plan] = {}  # calls that share a plan share its edited plan, which is checked once
    changed: list[list[Plan]] = []
    for plans in calls:
        changed.append(list(plans))
        if plans[0].op == op:
            for rank in range(len(plans)) if everywhere and taken.kind == "dependency" else at_rank:
                plan = plans[rank]
                if id(plan) not in known:
                    known[id(plan)] = edited(plan)
                changed[-1][rank] = known[id(plan)]
    return changed


def _without_dependency(plan: Plan, index: int, earlier: int) -> Plan:
    step = plan.steps[index]
    return _with(plan, index, replace(step, after=tuple(each for each in step.after if each != earlier)))


def _with(plan: Plan, index: int, step: Step) -> Plan:
    return replace(plan, steps=(*plan.steps[:index], step, *plan.steps[index + 1 :]))
