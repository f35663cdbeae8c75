"""The slots of FSDP's collectives when a CUDA graph is captured between two calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symm_overlap.fsdp.communication.collectives import all_gather
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.settings import current
from tests.gpu.conftest import Worlds
from tests.gpu.test_collectives import agree
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

N = 256


def gather(slots: Slots, me: Rank, value: float) -> Tensor:
    output = slots.allocate((me.world * N,), torch.float32)
    all_gather(slots, output, output.chunk(me.world)[me.rank].fill_(value + me.rank))
    return output


def expected(me: Rank, value: float) -> Tensor:
    return torch.arange(float(me.world)).add(value).repeat_interleave(N)


def freed_in_a_capture(me: Rank, grown: bool) -> None:
    """The last tensor of a slot goes away during a capture. With ``grown``, its memory goes with it."""
    slots = Slots("gather", me.group, me.device, 2, current())
    x = torch.zeros(N, device=me.device)
    for value in (10.0, 20.0, 30.0):
        output = gather(slots, me, value)
        if grown:
            slots.reserve(2 * slots.count, slots.nbytes)
        read = output.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            del output
        graph.replay()
        agree(read, expected(me, value))
        if not grown:
            agree(gather(slots, me, value + 1), expected(me, value + 1))
    agree(x, torch.full((N,), 3.0))
    agree(gather(slots, me, 40.0), expected(me, 40.0))


@pytest.mark.parametrize("grown", [False, True])
def test_a_tensor_may_go_away_during_a_capture(gpu_ranks: Worlds, grown: bool) -> None:
    gpu_ranks.run(2, freed_in_a_capture, grown)
