"""Groups that share some ranks. Each group has as many rendezvous for symmetric memory as it needs."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from tests.gpu.conftest import Worlds
from tests.gpu.test_collectives import all_shards
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)


@cache
def pairs() -> list[dist.ProcessGroup]:
    """Return the groups of ranks 0 and 1, and of ranks 1 and 2. All ranks create them, once."""
    return [dist.new_group([first, first + 1]) for first in range(2)]


def met_in_different_numbers(me: Rank, path: str) -> None:
    """Gather in each group of a list, through the workspaces of its lanes and from its own symmetric memory.

    When all three ranks have a rendezvous, rank 1 has had more of them than the others.
    """
    first, second = pairs()
    calls = [(first, 40), (first, 41), (second, 40), (me.group, 40), (first, 42), (me.group, 41), (second, 42)]
    for number, (group, lane) in enumerate(calls):
        rank = dist.get_group_rank(group, me.rank) if me.rank in dist.get_process_group_ranks(group) else None
        if rank is None:
            continue
        shards = all_shards(group.size(), 64, 32, call=number, dtype=torch.float32)
        with symm_overlap.lane(lane), symm_overlap.force_path(path):
            in_place = symm_overlap.empty(64, 32, group=group, device=me.device).copy_(shards[rank])
            for given in (shards[rank].to(me.device), in_place):
                found = symm_overlap.all_gather(given, 0, group)
                torch.testing.assert_close(found.cpu(), torch.cat(shards), rtol=0, atol=0)


@pytest.mark.parametrize("path", ["sequential", "pipelined"])
def test_ranks_that_have_met_in_different_numbers_meet_again(gpu_ranks: Worlds, path: str) -> None:
    gpu_ranks.run(3, met_in_different_numbers, path)
