"""Steps that a device can carry out in one launch: all ranks meet, and the steps after that read the peers' memory.

There are two kinds of such launches, in plans whose sums read the peers' memory in place (`meets_in_kernels`). Their
steps follow one another directly on one stream::

    signal, wait, reduce [, signal]     signal all peers, wait for them, sum [, signal that the sum is there]
    wait, pull, pull, ...               wait for the sums of all peers, and copy them

In a call of a few microseconds with many kernels, most of the time passes between the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..plan import Item, Plan, Region, Step, kind
from .work import Sum, WorkOf, tensor_of

At = Callable[[Region], Tensor]


class MeetAndSum(NamedTuple):
    """Signal to all peers and wait for them on ``channel``, then ``sum``, then signal on ``done_channel`` unless it is
    None.

    Attributes:
        steps: the number of steps that the launch replaces.
        received: bytes that the sum reads from peers.
    """

    steps: int
    channel: int
    sum: Sum
    done_channel: int | None
    received: int


class AwaitAndGather(NamedTuple):
    """Wait for all peers on ``channel``, and copy each peer's part to its place in the tensor ``out``.

    Attributes:
        steps: the number of steps that the launch replaces.
        sources: by rank, the address of its part; 0 for this rank, whose part is not copied.
        part_bytes: bytes of a rank's part. The parts of the last ranks may be shorter or empty.
        received: bytes that are copied.
    """

    steps: int
    channel: int
    sources: tuple[int, ...]
    part_bytes: int
    out: Tensor
    received: int


def meets_in_kernels(plan: Plan) -> bool:
    """True if the signals and waits of a plan are always kernels, or parts of kernels, even on a device that has other
    ways.

    This is so if a step that computes reads the peers' memory. Then nothing runs at the same time, and a wait may
    occupy multiprocessors. The rule holds for the steps one by one too, since the ranks of one call may issue them in
    different ways.
    """
    found: bool | None = plan.derived.get(meets_in_kernels)
    if found is None:
        found = any(
            kind(step.kind).role == "compute" and any(region.rank != plan.rank for region in step.reads)
            for step in plan.steps
        )
        plan.derived[meets_in_kernels] = found
    return found


def launches(
    plan: Plan, at: At, tensors: Mapping[str, Tensor], work: WorkOf, fused_meetings: bool
) -> Iterator[tuple[Sequence[Item], MeetAndSum | AwaitAndGather | None]]:
    """Yield the items of a plan in order. Items that are carried out in one launch come together, with that launch; any
    other item comes alone, with None.

    Args:
        at: returns the view of a region.
        tensors: by buffer, the tensors of the call.
        work: returns what a step computes.
        fused_meetings: whether the device can carry out several steps in one launch.
    """
    items = plan.program.items
    fused_meetings = fused_meetings and meets_in_kernels(plan)
    begin = 0
    while begin < len(items):
        left = items[begin:]
        launch = (_sum_behind(plan, left, work) or _gather_behind(plan, left, at, tensors)) if fused_meetings else None
        count = 1 if launch is None else launch.steps
        yield left[:count], launch
        begin += count


def _sum_behind(plan: Plan, items: Sequence[Item], work: WorkOf) -> MeetAndSum | None:
    if len(items) < 3 or not _directly_behind(items[:3]):
        return None
    signal, wait, reduce = (item.step for item in items[:3])
    meets = _meets_all(plan, signal, "posts") and _meets_all(plan, wait, "awaits") and signal.channel == wait.channel
    described = work(reduce) if meets else None
    if described is None or len(described) != 1 or not isinstance(total := described[0], Sum):
        return None
    assert signal.channel is not None
    peers = [partial for partial, region in zip(total.partials, reduce.reads, strict=True) if region.rank != plan.rank]
    received = sum(tensor_of(partial).nbytes for partial in peers)
    if len(items) > 3 and _directly_behind(items[:4]) and _meets_all(plan, items[3].step, "posts"):
        return MeetAndSum(4, signal.channel, total, items[3].step.channel, received)
    return MeetAndSum(3, signal.channel, total, None, received)


def _gather_behind(plan: Plan, items: Sequence[Item], at: At, tensors: Mapping[str, Tensor]) -> AwaitAndGather | None:
    count, out = plan.world, tensors.get("output")
    wait, pulls = items[0].step, [item.step for item in items[1:count]]
    if out is None or not _meets_all(plan, wait, "awaits") or not _directly_behind(items[:count]):
        return None
    if {step.reads[0].rank for step in pulls if step.kind == "pull" and step.writes[0].buffer == "output"} != set(
        wait.peers
    ):
        return None
    part = at(Region("output", plan.rank, 0, 1)).nbytes
    sources, received = [0] * plan.world, 0
    for step in pulls:
        owner, target, source = step.reads[0].rank, at(step.writes[0]), at(step.reads[0])
        if target.data_ptr() != out.data_ptr() + min(owner * part, out.nbytes) and target.nbytes:
            return None
        sources[owner] = source.data_ptr()
        received += target.nbytes
    assert wait.channel is not None
    return AwaitAndGather(count, wait.channel, tuple(sources), part, out, received)


def _meets_all(plan: Plan, step: Step, how: str) -> bool:
    return kind(step.kind).meets == how and set(step.peers) == set(range(plan.world)) - {plan.rank}


def _directly_behind(items: Sequence[Item]) -> bool:
    """True if these items follow one another on one stream, with no event between them that involves another stream."""
    return (
        len({item.step.stream for item in items}) == 1
        and not any(item.waits for item in items[1:])
        and all(item.event is None for item in items[:-1])
    )
