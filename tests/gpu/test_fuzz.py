"""A few random programs of `tests.gpu.fuzz`, the same ones in every run."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.fuzz.session import run_programs

pytestmark = pytest.mark.gpu

COUNT = 8


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_are_exact(gpu_ranks: Worlds, world: int, waits: str) -> None:
    for counts in gpu_ranks.run(world, run_programs, 0, range(COUNT), waits=waits):
        assert counts.programs == COUNT
        assert counts.graphs
        assert counts.outputs > counts.calls
