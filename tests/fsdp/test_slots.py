"""A ring reuses a slot only after its last reader, and never overwrites a tensor that outlives its turn."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from symm_overlap import timeout
from symm_overlap.fsdp.communication.collectives import all_gather
from symm_overlap.fsdp.communication.memory import GATHER, Memory
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.settings import current
from tests.ranks import Pool, Rank
from tests.runtime.captures import captures_on_cpu

N = 40


def gather(slots: Slots, me: Rank, value: float) -> Tensor:
    output = slots.allocate((me.world * N,), torch.float32)
    mine = output.chunk(me.world)[me.rank].fill_(value + me.rank)
    all_gather(slots, output, mine)
    return output


def right(output: Tensor, me: Rank, value: float) -> bool:
    return torch.equal(output, torch.arange(float(me.world)).add(value).repeat_interleave(N))


def outlives(me: Rank, alive: int) -> tuple[int, int]:
    slots = Slots("gather", me.group, me.device, 2, current())
    kept: list[Tensor] = []
    for call in range(30):
        kept.append(gather(slots, me, 10.0 * call)[: me.world * N])  # a view also keeps the slot alive
        kept = kept[-alive:]
        for age, output in enumerate(reversed(kept)):
            assert right(output, me, 10.0 * (call - age)), (call, age)
    return slots.count, slots.turn


@pytest.mark.parametrize(("alive", "slots"), [(1, 2), (2, 4), (3, 4), (7, 8)])
def test_tensors_that_are_alive_are_never_overwritten(ranks: Pool, alive: int, slots: int) -> None:
    assert ranks.run(3, outlives, alive) == [(slots, 30)] * 3


def grows(me: Rank) -> None:
    slots = Slots("gather", me.group, me.device, 2, current())
    kept = gather(slots, me, 0.0)
    for numel in (1, 1000, 300_000, 3_000_000, 5):
        output = slots.allocate((me.world * numel,), torch.float64)
        all_gather(slots, output, output.chunk(me.world)[me.rank].fill_(me.rank))
        assert torch.equal(output, torch.arange(me.world).double().repeat_interleave(numel))
        del output
    assert right(kept, me, 0.0), "a tensor from before the slots grew must stay unchanged"


def test_slots_grow_for_larger_tensors(ranks: Pool) -> None:
    ranks.run(2, grows)


def alive_on_one_rank(me: Rank) -> str:
    slots = Slots("gather", me.group, me.device, 2, current())
    kept = [gather(slots, me, float(call)) for call in range(2)]
    if me.rank == 1:
        kept.clear()
    with timeout(20), pytest.raises(dist.DistBackendError) as raised:
        gather(slots, me, 2.0)
    assert all(right(output, me, float(call)) for call, output in enumerate(kept))
    return str(raised.value)


def test_ranks_that_disagree_about_what_is_alive_are_told(ranks: Pool) -> None:
    for message in ranks.run(2, alive_on_one_rank):
        assert "gather" in message


def without_a_call(me: Rank) -> int:
    """On every rank, a step fails after it has requested memory and before it calls the gather."""
    slots = Slots("gather", me.group, me.device, 2, current())
    for call in range(6):
        slots.allocate((me.world * N,), torch.float32)
        assert right(gather(slots, me, float(call)), me, float(call))
    return slots.count


def test_memory_that_was_asked_for_in_vain_costs_nothing(ranks: Pool) -> None:
    assert ranks.run(2, without_a_call) == [2, 2]


def during_a_capture(me: Rank) -> None:
    """Rank 0 captures a graph. Its gather is refused, and the ranks stay in step."""
    slots = Slots("gather", me.group, me.device, 2, current())
    output = gather(slots, me, 0.0)
    if me.rank == 0:
        with captures_on_cpu(), pytest.raises(RuntimeError, match="gather: slots cannot be used in a CUDA graph"):
            gather(slots, me, 1.0)
    assert right(output, me, 0.0)
    assert right(gather(slots, me, 2.0), me, 2.0)


def test_a_call_is_refused_while_a_graph_is_captured(ranks: Pool) -> None:
    ranks.run(2, during_a_capture)


class Stream:
    """A stand-in for a device's module. It has one stream, and logs what the stream waits for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events = 0

    def current_stream(self, device: Any = None) -> Stream:
        return self

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append(event)


def waits(me: Rank, count: int) -> list[list[str]]:
    slots = Slots("gather", me.group, me.device, count, current())
    slots.reserve(count, 4 * N * me.world)
    stream = Stream()
    slots._current_stream = stream.current_stream  # type: ignore[assignment]
    slots._mark = stream.record_event  # type: ignore[assignment]
    found = []
    for call in range(6):
        output = gather(slots, me, float(call))
        found.append(stream.log)
        stream.log = []
        del output
    return found


def test_a_slot_is_asked_for_behind_the_call_after_its_last_one_and_behind_its_last_reader(ranks: Pool) -> None:
    # Call k records event 2k + 1. When its output is released, event 2k + 2 is recorded.
    behind_two = [[], ["event 1"], *([f"event {2 * k - 1}", f"event {2 * k - 2}"] for k in range(2, 6))]
    assert ranks.run(2, waits, 2)[0] == behind_two
    behind_three = [[], [], ["event 1"], *([f"event {2 * k - 3}", f"event {2 * k - 4}"] for k in range(3, 6))]
    assert ranks.run(2, waits, 3)[0] == behind_three


def by_device(me: Rank) -> None:
    memory = Memory(current(), 2)
    assert memory.slots(GATHER, me.group, me.device) is memory.slots(GATHER, me.group, me.device)
    with pytest.warns(UserWarning, match="does not know the device 'meta'"):
        assert memory.slots(GATHER, me.group, torch.device("meta")) is None


def test_a_group_has_slots_for_each_device(ranks: Pool) -> None:
    ranks.run(2, by_device)


def shared_memory() -> int:
    """Return the shared memory that this process has touched, in kB. What other processes touch does not count."""
    text = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssShmem:"))


def frees(me: Rank) -> None:
    def use() -> int:
        slots = Slots("gather", me.group, me.device, 2, current())
        output = slots.allocate((8_000_000,), torch.float32).fill_(1)
        all_gather(slots, output, output.chunk(me.world)[me.rank])
        return shared_memory()

    gather(Slots("gather", me.group, me.device, 2, current()), me, 0.0)
    gc.collect()
    before = shared_memory()
    for _ in range(3):
        assert use() > before + 10_000
        gc.collect()
        dist.barrier(me.group)
        assert shared_memory() < before + 1_000


def test_memory_goes_with_the_slots(ranks: Pool) -> None:
    ranks.run(2, frees)
