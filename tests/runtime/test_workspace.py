"""The workspace of a lane: what it hands out lies within one half, and halves do not overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import symm_overlap
from symm_overlap.runtime import state_of
from symm_overlap.runtime.symmetric import half_size
from tests.ranks import Pool, Rank


def views(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane):
        symm_overlap.prepare(me.group, 1)
    workspace = state_of(me.group).lane(me.group, me.device, lane).workspace
    half, peer = workspace.half, 1 - me.rank
    last = workspace.view(peer, 0, half - 8, (2,), torch.float32)
    first = workspace.view(peer, 1, 0, (2,), torch.float32)
    assert first.data_ptr() == last.data_ptr() + 8, "the second half follows the first"
    for offset, shape in ((half - 4, (2,)), (half, (1,)), (0, (half // 4 + 1,)), (half - 8, (1, 3))):
        with pytest.raises(IndexError, match=f"at byte {offset} does not fit a workspace of {half} bytes"):
            workspace.view(peer, 1, offset, shape, torch.float32)
    assert workspace.view(peer, 1, half, (0,), torch.float32).numel() == 0


def test_views_lie_within_one_half(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, views, fresh_lane())


def kept_views(me: Rank, lane: int) -> None:
    """Calls come again, so views are kept; those of inference mode are tensors of another sort."""
    with symm_overlap.lane(lane):
        symm_overlap.prepare(me.group, 1)
    workspace = state_of(me.group).lane(me.group, me.device, lane).workspace
    view = workspace.view(0, 0, 256, (3,), torch.float32)
    assert workspace.view(0, 0, 256, (3,), torch.float32) is view
    for other in ((1, 0, 256, (3,)), (0, 1, 256, (3,)), (0, 0, 512, (3,)), (0, 0, 256, (1, 3))):
        assert workspace.view(*other, torch.float32) is not view
    assert workspace.view(0, 0, 256, (3,), torch.int32).dtype == torch.int32
    with torch.inference_mode():
        assert workspace.view(0, 0, 256, (3,), torch.float32).is_inference()
    for offset in range(0, 4 * 3000, 4):  # of many different calls
        workspace.view(0, 0, offset, (1,), torch.float32)
    assert len(workspace._views) <= 1024
    before = workspace.half
    with symm_overlap.lane(lane):
        symm_overlap.prepare(me.group, before + 1)
    assert workspace.half == 2 * before
    assert workspace.view(0, 0, 256, (3,), torch.float32).data_ptr() != view.data_ptr(), "the workspace has moved"


def test_views_are_kept_until_the_workspace_grows(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, kept_views, fresh_lane())


@pytest.mark.parametrize(
    ("nbytes", "half"),
    [
        (1, 1 << 20),
        (1 << 20, 1 << 20),
        ((1 << 20) + 1, 1 << 21),
        (1 << 25, 1 << 25),
        ((1 << 26) - 1, 1 << 26),
        (1 << 26, 1 << 26),
        ((1 << 26) + 1, (1 << 26) + 256),
        ((1 << 26) + 256, (1 << 26) + 256),
    ],
)
def test_a_half_is_a_power_of_two_of_at_least_a_mebibyte_or_if_it_is_large_just_what_is_needed(
    nbytes: int, half: int
) -> None:
    assert half_size(nbytes) == half
