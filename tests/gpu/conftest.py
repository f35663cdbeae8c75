"""Ranks for the GPU tests: processes that share one GPU, or spread over several, in a gloo group."""

from collections.abc import Iterator

import pytest

from tests.ranks import Pool

ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "SYMM_OVERLAP_CHECK": "0",  # a rank that does not come must be noticed by the GPU, not by a check on the host
}


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Pool]:
    """Ranks with a GPU, for worlds 1 to 4: ``gpu_ranks.run(world, function, *args)``."""
    pool = Pool(4, groups=[(0,), (0, 1), (0, 1, 2)], environment=ENVIRONMENT, device="cuda")
    yield pool
    pool.close()
