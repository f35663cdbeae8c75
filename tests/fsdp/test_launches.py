"""What a GPU would launch for a gather and a reduction in a slot, issued to a stand-in that only records launches.

The lists in tests/fsdp/launches make changes of launches visible in a review. To write them again, run
``python -m tests.fsdp.test_launches``.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.harness.stand_in import StandIn, standing_in
from symm_overlap.fsdp.communication.collectives import all_gather, reduce_scatter
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.runtime.stand_in import StandInWorkspace
from symm_overlap.settings import current

LISTS = Path(__file__).parent / "launches"
N = 64


def gather(slots: Slots) -> None:
    """Gather as FSDP2 does: the output is the slot, and the caller has copied the own shard there."""
    output = slots.allocate((N * slots.world,), torch.float32)
    all_gather(slots, output, output.chunk(slots.world)[slots.rank])


def gather_outside(slots: Slots) -> None:
    all_gather(slots, torch.empty(N * slots.world), torch.empty(N))


def reduce(slots: Slots) -> None:
    reduce_scatter(
        slots, torch.empty(N), slots.allocate((N * slots.world,), torch.float32), dist.ReduceOp(dist.ReduceOp.AVG)
    )


CALLS = {call.__name__: call for call in (gather, gather_outside, reduce)}
LISTED = [*itertools.product(CALLS, (2, 8))]


def slots_of(me: StandIn, world: int) -> Slots:
    slots = Slots("slots", me.group, torch.device("cpu"), 2, current())
    slots.reserve(2, N * world * torch.float32.itemsize)
    return slots


def listed(call: str, world: int) -> str:
    """Return what rank 0 launches in one call, one launch per line."""
    with standing_in(0, world) as me:
        slots = slots_of(me, world)
        CALLS[call](slots)
        workspace = slots.lane.workspace
        assert isinstance(workspace, StandInWorkspace)
        return "".join(f"{stream:9} {what:9} {rest}".rstrip() + "\n" for stream, what, rest in workspace.launched())


@pytest.mark.parametrize(("call", "world"), LISTED)
def test_launches_are_those_of_the_list(call: str, world: int) -> None:
    assert listed(call, world) == (LISTS / f"{call}_{world}.txt").read_text()


@pytest.mark.parametrize("call", CALLS)
def test_no_step_needs_python(call: str) -> None:
    with standing_in(1, 3) as me:
        slots = slots_of(me, 3)
        CALLS[call](slots)
        (kept,) = slots.lane._kept.values()
        assert kept.script is not None
        assert kept.script.complete


if __name__ == "__main__":
    LISTS.mkdir(exist_ok=True)
    for each in LISTED:
        (LISTS / f"{each[0]}_{each[1]}.txt").write_text(listed(*each))
