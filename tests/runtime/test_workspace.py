"""The workspace of a lane: each view that it returns is inside one half, and the halves do not overlap."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import symm_overlap
from symm_overlap.runtime import state_of
from symm_overlap.runtime.symmetric import half_size
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import in_thread, shared_mappings
from tests.transforms import make_room

MIB = 1 << 20


def views(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane):
        make_room(me.group, 1)
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
    """Views are kept, because calls are repeated. Views made in inference mode are kept separately."""
    with symm_overlap.lane(lane):
        make_room(me.group, 1)
        lane_of = state_of(me.group).lane(me.group, me.device, lane)
        X, other = torch.ones(2, 3), torch.ones(3, 2)
        symm_overlap.all_gather(X, 0, me.group)
        symm_overlap.all_gather(X, 0, me.group)  # in the other half
        made = {key: dict(kept.views) for key, kept in lane_of._kept.items()}
        assert len(made) == 2
        assert all(made.values())
        symm_overlap.all_gather(X, 0, me.group)
        found = lane_of._kept
        assert made.keys() == found.keys()
        assert all(view is made[key][region] for key, kept in found.items() for region, view in kept.views.items())
        symm_overlap.all_gather(other, 0, me.group)  # has the same size, but needs views of another shape
        assert len(lane_of._kept) == 3
        with torch.inference_mode():
            assert torch.equal(symm_overlap.all_gather(X, 0, me.group), torch.ones(2 * me.world, 3))
        assert any(view.is_inference() for kept in lane_of._kept.values() for view in kept.views.values())
        for call in range(600):
            lane_of.kept("call", call)
        assert len(lane_of._kept) <= 256
        symm_overlap.all_gather(X, 0, me.group)
        before = lane_of.workspace.half
        make_room(me.group, before + 1)
        assert lane_of.workspace.half == before + MIB
        assert not lane_of._kept, "the workspace has moved"
        assert torch.equal(symm_overlap.all_gather(other, 0, me.group), torch.ones(3 * me.world, 2))


def test_views_are_kept_until_the_workspace_grows(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, kept_views, fresh_lane())


def bytes_mapped() -> int:
    """Return the bytes of shared memory that this process has mapped: its own and its peers'."""
    ranges = [mapping.split()[0].split("-") for mapping in shared_mappings()]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def grown(me: Rank, lanes: list[int]) -> None:
    """Each thread makes calls on its own lane. The garbage collector is off: memory in a reference cycle would stay."""
    A, B = torch.ones(8 * me.world, 6, requires_grad=True), torch.ones(6, 4, requires_grad=True)

    def calls(lane: int, mebibytes: int) -> None:
        with symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=2, streams=1 + lane % 2):
            make_room(me.group, mebibytes * MIB)
            for _ in range(2):
                symm_overlap.all_gather_matmul(A, [B], 0, me.group)[1][0].sum().backward()
                symm_overlap.matmul_all_reduce(A, B, "sum", me.group)

    for lane in lanes:  # allocates what each lane needs besides its workspace
        calls(lane, 1)
    gc.collect()
    gc.disable()
    try:
        before = bytes_mapped()
        for mebibytes in (2, 3, 5):
            for thread in [in_thread(calls, lane, mebibytes) for lane in lanes]:
                thread.join()
            assert bytes_mapped() == before + len(lanes) * me.world * 2 * (mebibytes - 1) * MIB
    finally:
        gc.enable()


def test_a_workspace_that_grows_gives_its_old_memory_back(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(3, grown, [fresh_lane(), fresh_lane()])


@pytest.mark.parametrize(
    ("nbytes", "half"),
    [
        (1, 1 << 20),
        (1 << 20, 1 << 20),
        ((1 << 20) + 1, 1 << 21),
        ((1 << 21) + 1, 3 << 20),
        ((1 << 26) + 1, 65 << 20),
        (1 << 33, 1 << 33),
    ],
)
def test_a_half_is_what_is_needed_in_whole_mebibytes(nbytes: int, half: int) -> None:
    assert half_size(nbytes) == half
