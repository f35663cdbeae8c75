"""What a lane decides on the host when it is on a GPU: halves, graphs, devices, and who learns of an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from symm_overlap import _C
from symm_overlap.memory import Lane, NotPreparedError, cuda_signals, workspace
from symm_overlap.memory.cuda_signals import CudaSignals
from tests.runtime.cuda_lane import DEVICE, Gpu, cuda_lane
from tests.runtime.symmetric import error_of
from tests.ranks import Pool, Rank


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def half_of_a_call(lane: Lane) -> int:
    with lane.call("all_gather", 64) as half:
        return half


def test_a_call_that_is_only_captured_uses_up_no_half(gpu: Gpu) -> None:
    lane = cuda_lane()
    halves = []
    for gpu.capturing in (False, True, False, True, True, False):
        halves.append(half_of_a_call(lane))
    ran = [halves[0], halves[2], halves[5]]
    assert ran == [0, 1, 0]


def test_graphs_keep_the_workspace_of_their_calls(gpu: Gpu) -> None:
    lane = cuda_lane()
    half_of_a_call(lane)
    assert not lane._captured
    gpu.capturing = True
    half_of_a_call(lane)
    assert lane._captured == {1 << 20: ("tensor", "handle")}


def test_no_workspace_is_made_during_a_capture_and_the_error_says_what_to_do(gpu: Gpu) -> None:
    lane = cuda_lane()
    gpu.capturing = True
    advice = r'lane 2 .*prepare\(group, 2000000, "cuda"\) before capturing'
    with pytest.raises(NotPreparedError, match=advice), lane.call("all_gather", 2_000_000):
        pass
    assert not lane.signals.asked  # type: ignore[attr-defined]
    gpu.capturing = False
    half_of_a_call(lane)  # the advice can be followed: the lane is in step


def test_steps_find_the_lanes_device_current(gpu: Gpu) -> None:
    with cuda_lane().call("all_gather", 64):
        assert gpu.current == DEVICE.index
    assert gpu.current == 0


def test_an_error_in_a_call_is_told_to_the_peers_at_once(gpu: Gpu) -> None:
    lane = cuda_lane()
    with pytest.raises(MemoryError), lane.call("all_gather", 64):
        raise MemoryError("no room")
    assert [name for name, *_ in lane.signals.asked] == ["begin", "give_up"]  # type: ignore[attr-defined]
    assert lane.signals.asked[-1] == ("give_up", "all_gather")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of step"):
        half_of_a_call(lane)


def test_an_error_before_the_first_call_is_just_that_error(gpu: Gpu) -> None:
    lane = cuda_lane()
    del lane.signals
    with pytest.raises(MemoryError), lane.turn("all_gather"):
        raise MemoryError("no room")


class ControlBlocks(CudaSignals):
    """Only made: there is no GPU for what follows."""

    def __init__(self, *arguments: object, **options: object) -> None: ...


def allocate(me: Rank, what: str) -> None:
    if what == "workspace":
        workspace.allocate(64, DEVICE, me.group, "cuda lane 0")
    else:
        ControlBlocks.create(me.group, DEVICE, lane=0, tag="cuda lane 0", channels=4)


def room_comes_late_on_rank_1(me: Rank, what: str) -> tuple[str, str, float]:
    room, meetings = me.rank != 1, []

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(*size, dtype=dtype)

    def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        meetings.append(tensor)

    with pytest.MonkeyPatch.context() as patch:
        for module in (workspace, cuda_signals):
            patch.setattr(module, "symm_mem", SimpleNamespace(empty=empty, rendezvous=rendezvous))
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(_C, "CudaLane", SimpleNamespace(control_words=lambda world, channels: 8), raising=False)
        failed = error_of(allocate, me, what)
        assert not meetings, "torch counts each rendezvous, on the ranks that come to it"
        room = True
        allocate(me, what)
        assert len(meetings) == 1
        assert what == "workspace" or meetings[0].eq(0).all()
    return failed


@pytest.mark.parametrize("what", ["workspace", "control block"])
def test_without_room_on_one_gpu_no_rank_goes_to_the_rendezvous(ranks: Pool, what: str) -> None:
    first, second, third = ranks.run(3, room_comes_late_on_rank_1, what)
    assert second[:2] == ("OutOfMemoryError", "CUDA out of memory")
    for kind, message, seconds in (first, third):
        assert kind == "DistBackendError"
        assert "rank 1 failed: OutOfMemoryError: CUDA out of memory" in message
        assert seconds < 5
