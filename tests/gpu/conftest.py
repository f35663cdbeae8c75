"""Ranks for the GPU tests: processes in a gloo group that share one GPU or use several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conditions import Conditions, run_under
from tests.ranks import Pool

# With fewer hardware queues, streams share them, and work of one stream may block work that another stream waits for.
# CUDA reads this variable when it starts, in the ranks and in this process.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

ENVIRONMENT = {
    "cuda": {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "SYMM_OVERLAP_CHECK": "0",  # the GPU, and not a check on the host, must detect a missing rank
    },
    "cpu": {"SYMM_OVERLAP_CHECK": "0", "TRITON_INTERPRET": "1"},  # runs the path "fused" in the interpreter
}

MOST_RANKS = 9 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""The most rank processes that are kept alive. On a virtual machine with an H200, CUDA ran out of memory at the start
of the 17th process or so, although the GPU had more than 100 GB left. Some tests need processes of their own."""

WAITS = {"kernels": {"SYMM_OVERLAP_STREAM_WAITS": "0"}, "memory": {"SYMM_OVERLAP_STREAM_WAITS": "1"}}
"""The ways in which streams wait for signals: by kernels that poll, or by memory operations."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of a file that need equal ranks next to each other, because ranks take seconds to start on a GPU."""
    here = [number for number, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    first = {items[number].path: number for number in reversed(here)}

    def ranks_of(item: pytest.Item) -> tuple[int, str, int]:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        return first[item.path], given.get("waits", ""), given.get("world", 0)

    for number, item in zip(here, sorted((items[number] for number in here), key=ranks_of), strict=True):
        items[number] = item


class Worlds:
    """A pool of ranks for each world size. The ranks of a pool use only the group of all ranks.

    Attributes:
        device: "cuda", or "cpu" in a dry run.

    Args:
        timeout: seconds that a function may take on all ranks.
    """

    def __init__(self, device: str, conditions: Conditions, timeout: float) -> None:
        self.device, self._conditions, self._timeout = device, conditions, timeout
        self._pools: dict[tuple[object, ...], Pool] = {}

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        waits: str = "kernels",
        timeout: float = 0.0,
        **environment: str,
    ) -> list[Any]:
        """Run a function as `Pool.run` does, under the conditions of this session.

        Each combination of ``waits`` and further environment variables has its own ranks. If ``timeout`` is longer than
        the session's, it replaces the session's.
        """
        timeout = max(timeout, self._timeout)
        key = (world, waits, *sorted(environment.items()))
        pool = self._pools.pop(key, None) or self.pool(world, waits=waits, **environment)
        while self._pools and sum(each.size for each in self._pools.values()) + world > MOST_RANKS:
            self._pools.pop(next(iter(self._pools))).close()  # the one that has not been used for the longest time
        self._pools[key] = pool
        return pool.run(world, run_under, self._conditions, function, *args, timeout=timeout)

    def pool(self, world: int, *, waits: str = "kernels", **environment: str) -> Pool:
        """Return ranks for a single test. The test must close or kill them."""
        variables = {**ENVIRONMENT[self.device], **WAITS[waits], **environment}
        return Pool(world, environment=variables, device=self.device)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def gpu_ranks(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """Ranks with a GPU: ``gpu_ranks.run(world, function, *args)``."""
    option = request.config.getoption
    conditions = Conditions(option("--random-sleeps"), option("--cuda-sanitizer"))
    worlds = Worlds(option("--gpu-tests-on"), conditions, option("--rank-timeout"))
    yield worlds
    worlds.close()
