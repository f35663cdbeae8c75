"""Ranks for the GPU tests: processes that share one GPU, or spread over several, in a gloo group."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import Pool

# With fewer, streams share hardware queues, in which one stands behind what another waits for. CUDA reads it when it
# starts, in the ranks and here.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "SYMM_OVERLAP_CHECK": "0",  # a rank that does not come must be noticed by the GPU, not by a check on the host
}


class Worlds:
    """A pool for each number of ranks, which use the group of all alone.

    Not groups of one pool: torch counts a process's rendezvous in all its groups, and ranks that come to one with
    different counts wait for each other for ever (pytorch issue 196082).
    """

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As `Pool.run`."""
        if world not in self._pools:
            self._pools[world] = Pool(world, environment=ENVIRONMENT, device="cuda")
        return self._pools[world].run(world, function, *args, **options)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Worlds]:
    """Ranks with a GPU: ``gpu_ranks.run(world, function, *args)``."""
    worlds = Worlds()
    yield worlds
    worlds.close()
