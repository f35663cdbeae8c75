"""Gathers and reductions with ``async_op=True`` run beside the current stream, which waits for them in ``wait()``."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import symm_overlap.fsdp
from symm_overlap.fsdp.communication.memory import REDUCE, Memory
from symm_overlap.fsdp.communication.torch_protocol import SlotAllGather, SlotReduceScatter
from symm_overlap.settings import current
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.test_collectives import agree
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

N = 4096
LONGEST = 10.0
"""Seconds in which the work that follows a call should be done. The peer is late by no more than that."""


class Params:
    """Stands in for torch's parameter group, which these calls do not use."""


PARAMS = Params()


class Late:
    """Rank 1 comes late. Rank 0 tells it when to come: after the work that rank 0 has enqueued is done, if it can be
    done without rank 1.
    """

    def __init__(self, me: Rank) -> None:
        self._me, self._word = me, torch.zeros(1)
        self._x = torch.ones(N, device=me.device)
        self._x.add_(1)  # the first launch of a kernel may wait for all that runs on a GPU
        torch.cuda.synchronize()

    def come(self) -> None:
        """On rank 1, wait until rank 0 says so."""
        if self._me.rank == 1:
            dist.recv(self._word, 0, group=self._me.group)

    def runs_before(self) -> bool:
        """On rank 0, tell whether work that is enqueued now is done before rank 1 comes, and let rank 1 come."""
        if self._me.rank == 1:
            return True
        self._x.add_(1)
        done = torch.cuda.current_stream().record_event()
        deadline = time.monotonic() + LONGEST
        while not done.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        found = done.query()
        dist.send(self._word, 1, group=self._me.group)
        return found


def full(me: Rank, value: float, numel: int = N) -> Tensor:
    return torch.full((numel,), value, device=me.device)


def calls_beside(me: Rank, kind: str) -> None:
    """The second call waits for the first one, so its input is read only when the peer has come. It is dropped before,
    and so is the memory into which the result of a third call is written.
    """
    memory = Memory(current(), 3)
    gather, reduce = SlotAllGather(PARAMS, memory), SlotReduceScatter(PARAMS, memory)

    def call(value: float, async_op: bool) -> tuple[Tensor, Any]:
        if kind == "gather":
            output = full(me, -2.0, me.world * N)
            return output, gather(output, full(me, value + me.rank), me.group, async_op)
        output = full(me, -2.0)
        given = full(me, value + me.rank, me.world * N)
        return output, reduce(output, given, me.group, dist.ReduceOp.SUM, async_op)

    def expected(value: float) -> Tensor:
        ranks = torch.arange(float(me.world)).add(value)
        return ranks.repeat_interleave(N) if kind == "gather" else ranks.sum().expand(N)

    agree(call(1.0, False)[0], expected(1.0))
    late = Late(me)
    late.come()
    calls = {value: call(value, True) for value in (10.0, 20.0)}
    call(30.0, True)
    junk = [full(me, -1.0, me.world * N) for _ in range(8)]  # would be in memory that was freed too early
    works = [work for _, work in calls.values()]
    assert me.rank == 1 or not any(work.is_completed() for work in works)
    beside = late.runs_before()
    for value, (output, work) in calls.items():
        work.wait()
        agree(output, expected(value))
    agree(call(40.0, False)[0], expected(40.0))
    assert all(work.is_completed() for work in works)
    for each in junk:
        agree(each, torch.full((me.world * N,), -1.0))
    assert beside, "the stream of the caller waited for the peer"


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_a_call_does_not_hold_up_what_follows(gpu_ranks: Worlds, kind: str, waits: str) -> None:
    gpu_ranks.run(2, calls_beside, kind, waits=waits)


def gradients_as_they_are(me: Rank) -> None:
    """bfloat16 holds 255 and 254, and not their sum."""
    memory = Memory(current(), 3)
    comm = SlotReduceScatter(PARAMS, memory)
    for number in range(4):
        slots = memory.slots(REDUCE, me.group, me.device)
        assert slots is not None
        given, output = slots.allocate((me.world * N,), torch.bfloat16), full(me, -1.0)
        work = comm(output, given.fill_(255.0 - me.rank), me.group, dist.ReduceOp.SUM, number % 2 == 1)
        if work is not None:
            work.wait()
        agree(output, torch.full((N,), 509.0))


@pytest.mark.parametrize("waits", WAITS)
def test_gradients_in_half_precision_are_summed_in_float32(gpu_ranks: Worlds, waits: str) -> None:
    gpu_ranks.run(2, gradients_as_they_are, waits=waits)


def model_of(me: Rank, layers: int) -> tuple[nn.Sequential, list[Tensor]]:
    """Return a model of which every layer is sharded, and the whole weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
    weights = [layer.weight.detach().clone() for layer in model]
    mesh = DeviceMesh.from_group(me.group, me.device.type)
    model.to(me.device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    symm_overlap.fsdp.apply(model, slots=layers + 1)
    return model, weights


def unshards_beside(me: Rank) -> None:
    model, weights = model_of(me, 3)
    for layer in model:
        layer.unshard()
        layer.reshard()
    late = Late(me)
    late.come()
    handles = [layer.unshard(async_op=True) for layer in model]
    beside = late.runs_before()
    for layer, weight, handle in zip(model, weights, handles, strict=True):
        handle.wait()
        agree(layer.weight.detach(), weight)
        layer.reshard()
    assert beside, "the stream that computes waited for the peer"


def test_unshard_does_not_hold_up_the_compute(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, unshards_beside)


def alternates(me: Rank) -> None:
    """Weights change from step to step, each rank is slow in some steps, and gathers are of either kind, in any mix."""
    model, weights = model_of(me, 4)
    for step in range(16):
        if step % me.world == me.rank:
            torch.cuda._sleep(2_000_000)
        handles = [layer.unshard(async_op=bool((step >> number) & 1)) for number, layer in enumerate(model)]
        for layer, weight, handle in zip(model, weights, handles, strict=True):
            if handle is not None:
                handle.wait()
            agree(layer.weight.detach(), weight)
            layer.reshard()
        with torch.no_grad():
            for layer, weight in zip(model, weights, strict=True):
                layer.weight.mul_(1.5)
                weight.mul_(1.5)


def test_calls_of_both_kinds_alternate(gpu_ranks: Worlds) -> None:
    gpu_ranks.run(2, alternates)
