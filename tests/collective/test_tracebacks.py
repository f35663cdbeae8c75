"""The traceback of an op's error shows the caller's mistake, not the inside of this package."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from tests.ranks import Pool, Rank
from tests.transforms import comparing

ops = torch.ops.symm_overlap
OURS = f"{Path(symm_overlap.__file__).parent}{os.sep}"


def t(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


BAD: dict[str, Callable[[Rank], object]] = {
    "op, size": lambda me: ops.fused_all_gather_matmul(t(4, 3), [t(7, 5)], 0, me.group_name),
    "op, with gradients": lambda me: ops.reduce_scatter(t(3).requires_grad_(), "sum", 0, me.group_name),
    "function, size": lambda me: symm_overlap.matmul_reduce_scatter(t(4, 3), t(7, 5), "sum", 0, me.group),
    "function, with gradients": lambda me: symm_overlap.reduce_scatter(t(3).requires_grad_(), "sum", 0, me.group),
    "function, option": lambda me: symm_overlap.all_gather_matmul(t(4, 3), [t(3, 5)], 0, me.group, save="all"),
    "function, type": lambda me: symm_overlap.all_gather(None, 0, me.group),
    "function, group": lambda me: symm_overlap.all_gather(t(4), 0, "nobody"),
    "a peer that does not come": lambda me: symm_overlap.all_gather(t(4), 0, me.group),
}


def frames(me: Rank, what: str, lane: int, full: bool) -> tuple[list[str], int]:
    """Return the frames that a user sees: the names of those in this file, and the number of this package's."""
    os.environ["SYMM_OVERLAP_FULL_TRACEBACK"] = str(int(full))
    late = what == "a peer that does not come"
    try:
        with comparing(False), symm_overlap.lane(lane), symm_overlap.timeout(0.3 if late else 60):
            if late:  # a group whose first call has failed could not be used after this
                with symm_overlap.timeout(60):
                    symm_overlap.all_gather(t(4), 0, me.group)
            if late and me.rank == 1:
                return [], 0
            with pytest.raises((ValueError, TypeError, dist.DistBackendError)) as raised:
                BAD[what](me)
    finally:
        del os.environ["SYMM_OVERLAP_FULL_TRACEBACK"]
    found = traceback.extract_tb(raised.value.__traceback__)
    shown = "".join(traceback.format_exception(raised.value))
    ours = shown.count(OURS)  # also counts frames of the errors that caused this one
    return [frame.name for frame in found if frame.filename == __file__], ours


@pytest.mark.parametrize("what", BAD)
def test_a_traceback_has_the_callers_frame_and_few_of_ours(
    ranks: Pool, fresh_lane: Callable[[], int], what: str
) -> None:
    callers, ours = ranks.run(2, frames, what, fresh_lane(), False)[0]
    assert callers == ["frames", "<lambda>"]
    assert ours <= 3


@pytest.mark.parametrize("what", ["op, size", "function, size", "a peer that does not come"])
def test_the_whole_traceback_comes_when_asked_for(ranks: Pool, fresh_lane: Callable[[], int], what: str) -> None:
    _, few = ranks.run(2, frames, what, fresh_lane(), False)[0]
    _, all_of_ours = ranks.run(2, frames, what, fresh_lane(), True)[0]
    assert all_of_ours > few
    assert all_of_ours >= 4
