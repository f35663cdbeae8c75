"""A call names the memory that it could not get, and allocates no more than it uses."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of
from tests.transforms import comparing

MIB = 1 << 20


def good(me: Rank) -> None:
    """Make a correct call and compare its result exactly."""
    Xs = [ref.binary((4, 6), torch.float32, seed=rank) for rank in range(me.world)]
    total = symm_overlap.all_reduce(Xs[me.rank], "sum", me.group)
    torch.testing.assert_close(total, torch.stack(Xs).sum(0), rtol=0, atol=0)


# --- the folder for shared memory


def call_without_folder(me: Rank, folder: str, without: int | None, check: bool) -> tuple[str, str, float]:
    if without in (None, me.rank):
        os.environ["SYMM_OVERLAP_SHM_DIR"] = folder  # read at the first call
    with comparing(check), symm_overlap.timeout(60):
        found = error_of(symm_overlap.all_gather, torch.ones(4), 0, me.group)
        with symm_overlap.force_path("c10d"):  # the message recommends this
            good(me)
    return found


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("without", [None, 0, 1])
def test_a_missing_folder_is_named_on_every_rank(
    fresh_ranks: Callable[..., Pool], tmp_path: Path, without: int | None, check: bool
) -> None:
    folder = str(tmp_path / "none")
    for kind, message, seconds in fresh_ranks(2).run(2, call_without_folder, folder, without, check):
        assert kind == "RuntimeError"
        assert f"rank {without or 0}: the folder for shared memory, {folder}, is missing" in message
        assert "set SYMM_OVERLAP_SHM_DIR to a writable tmpfs, or force_path('c10d')" in message
        assert seconds < SOON


# --- no memory for an output


def output_without_room(me: Rank, path: str, lane: int) -> None:
    """The output would need 16 TiB of memory. The input is an expanded tensor of four bytes."""
    with symm_overlap.lane(lane), symm_overlap.force_path(path):
        good(me)
        with pytest.raises(RuntimeError, match="memory"):
            symm_overlap.all_reduce(torch.ones(1).expand(1 << 20, 1 << 22), "sum", me.group)
        good(me)


@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
def test_an_output_that_there_is_no_memory_for_leaves_the_lane_usable(
    ranks: Pool, fresh_lane: Callable[[], int], path: str
) -> None:
    ranks.run(2, output_without_room, path, fresh_lane())


# --- more chunks than rows


def many_chunks(me: Rank, path: str, streams: int) -> int:
    """Return by how many MiB the calls with many chunks raise the peak memory of the process."""
    A, B = torch.ones(8, 4), torch.ones(4, 2)

    def calls() -> None:
        symm_overlap.all_gather_matmul(A, [B], 0, me.group)
        symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)
        symm_overlap.matmul_all_reduce(A, B, "sum", me.group)
        symm_overlap.all_gather(A, 1, me.group)

    with symm_overlap.force_path(path, chunks=1, streams=streams):
        calls()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with symm_overlap.force_path(path, chunks=10**5, streams=streams):
        calls()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


@pytest.mark.parametrize(("path", "streams"), [("pipelined", 1), ("pipelined", 2), ("c10d", 1)])
def test_more_chunks_than_rows_take_no_memory(ranks: Pool, path: str, streams: int) -> None:
    assert max(ranks.run(2, many_chunks, path, streams)) < 32
