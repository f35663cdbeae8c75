"""Ranks for the GPU tests: processes that share one GPU, or spread over several, in a gloo group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu.conditions import Conditions, run_under
from tests.ranks import Pool

# With fewer, streams share hardware queues, in which one stands behind what another waits for. CUDA reads it when it
# starts, in the ranks and here.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

ENVIRONMENT = {
    "cuda": {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "SYMM_OVERLAP_CHECK": "0",  # a rank that does not come must be noticed by the GPU, not by a check on the host
    },
    "cpu": {"SYMM_OVERLAP_CHECK": "0", "TRITON_INTERPRET": "1"},  # the path "fused" runs in the interpreter
}

WAITS = {"kernels": {"SYMM_OVERLAP_STREAM_WAITS": "0"}, "memory": {"SYMM_OVERLAP_STREAM_WAITS": "1"}}
"""By what streams wait for signals: kernels that poll, or memory operations."""


class Worlds:
    """A pool for each number of ranks, which use the group of all alone.

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
        """As `Pool.run`, under the conditions of this session. ``waits`` and what is given by name make other ranks; a
        longer ``timeout`` than the session's counts.
        """
        timeout = max(timeout, self._timeout)
        key = (world, waits, *sorted(environment.items()))
        if key not in self._pools:
            self._pools[key] = self.pool(world, waits=waits, **environment)
        return self._pools[key].run(world, run_under, self._conditions, function, *args, timeout=timeout)

    def pool(self, world: int, *, waits: str = "kernels", **environment: str) -> Pool:
        """Ranks for one test alone, which closes or kills them."""
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
