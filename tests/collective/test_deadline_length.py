"""A wait ends at the deadline that the caller has set, not at a multiple of it, wherever the call waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing

SECONDS = 0.5
TRIES = 3


def waits(me: Rank, lanes: Sequence[int], where: str) -> list[float]:
    """Return how long rank 0 waits for rank 1, which never calls. There are several tries, as machines may be busy."""
    took = []
    for lane in lanes:
        with (
            symm_overlap.lane(lane),
            symm_overlap.force_path("c10d" if where == "c10d" else "pipelined"),
            comparing(where == "comparison"),
        ):
            if where in ("signal", "c10d"):
                symm_overlap.all_reduce(torch.ones(4), "sum", me.group)
            if me.rank == 1:
                continue
            start = time.monotonic()
            with symm_overlap.timeout(SECONDS), pytest.raises(dist.DistBackendError):
                symm_overlap.all_reduce(torch.ones(4), "sum", me.group)
            took.append(time.monotonic() - start)
    return took


@pytest.mark.parametrize("where", one_in(2, ["signal", "workspace", "c10d", "comparison"]))
def test_a_wait_lasts_as_long_as_its_deadline(ranks: Pool, fresh_lane: Callable[[], int], where: str) -> None:
    took, _ = ranks.run(2, waits, [fresh_lane() for _ in range(TRIES)], where)
    assert SECONDS <= min(took) < 1.6 * SECONDS
