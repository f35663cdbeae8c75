"""What the host decides for a lane on a GPU: workspace halves, graphs, devices, and who is notified of an error."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from symm_overlap import _C
from symm_overlap.runtime import Lane, NotPreparedError
from symm_overlap.runtime.cuda import signals, workspace
from symm_overlap.runtime.cuda.signals import CudaSignals
from symm_overlap.runtime.cuda.workspace import CudaWorkspace
from symm_overlap.runtime.lane import CaptureFailedError
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.runtime.cuda_lane import DEVICE, FakeSignals, Gpu, asked_of, call, cuda_lane, workspace_of
from tests.runtime.symmetric import error_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def half_of_a_call(lane: Lane) -> int:
    halves: list[int] = []
    call(lane, halves.append)
    return halves[0]


def test_a_call_that_is_only_captured_uses_up_no_half(gpu: Gpu) -> None:
    """Calls outside graphs alternate between the halves, and captured calls in between do not count."""
    lane = cuda_lane()
    halves = []
    for gpu.capturing in (False, True, False, True, True, False):
        halves.append(half_of_a_call(lane))
    ran = [halves[0], halves[2], halves[5]]
    assert ran == [0, 1, 0]


def test_calls_of_a_graph_use_the_halves_in_turn_whatever_was_captured_before(gpu: Gpu) -> None:
    """A rank may have captured graphs that were thrown away. It must still use the same halves as its peers."""
    lane = cuda_lane()
    gpu.capturing, signals, halves = True, workspace_of(lane)._signals, []
    for signals.first_of_a_graph in (True, False, False, True, True, False):  # type: ignore[union-attr]
        halves.append(half_of_a_call(lane))
    assert halves == [0, 1, 0, 0, 0, 1]


def test_a_call_is_kept_apart_from_replays_once_there_is_room(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the workspace grows, the host waits for all streams, so no kernel that waits for peers may be enqueued."""
    lane = cuda_lane()
    made: list[list[object]] = []
    workspace = workspace_of(lane)
    monkeypatch.setattr(workspace, "grow", lambda nbytes, channels: made.append([name for name, *_ in asked_of(lane)]))
    call(lane, nbytes=1 << 21)
    assert made == [["begin"]]
    assert [name for name, *_ in asked_of(lane)] == ["begin", "begin", "barrier_around_replays", "end"]


def test_graphs_keep_the_workspace_of_their_calls(gpu: Gpu) -> None:
    """The workspace of a captured call is kept alive, because replays of the graph use it."""
    lane = cuda_lane()
    call(lane)
    assert not workspace_of(lane)._captured
    gpu.capturing = True
    call(lane)
    assert list(workspace_of(lane)._captured.values()) == [(workspace_of(lane)._memory, workspace_of(lane)._signals)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[weakref.ref[object]]]:
    """Lets lanes grow without ranks. Returns what they make: their workspaces, and their signals."""
    made: dict[str, list[weakref.ref[object]]] = {"workspaces": [], "signals": []}

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = torch.empty(*size, dtype=dtype)
        made["workspaces"].append(weakref.ref(tensor))
        return tensor

    def create(*arguments: object, **options: object) -> FakeSignals:
        signals = FakeSignals()
        made["signals"].append(weakref.ref(signals.memory))
        return signals

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(workspace, "resolve_group", lambda name: None)
    monkeypatch.setattr(workspace, "on_every_rank", lambda make, group, tag: make())
    monkeypatch.setattr(workspace, "symm_mem", SimpleNamespace(empty=empty))
    monkeypatch.setattr(workspace, "rendezvous", lambda tensor, group: SimpleNamespace(tensor=tensor))
    monkeypatch.setattr(workspace, "CudaSignals", SimpleNamespace(create=create))
    return made


def alive(made: list[weakref.ref[object]]) -> list[bool]:
    return [each() is not None for each in made]


def test_a_workspace_that_grows_gives_back_what_no_graph_was_captured_with(
    gpu: Gpu, made: dict[str, list[weakref.ref[object]]]
) -> None:
    """When the workspace grows, its old memory is freed, unless a graph was captured with it."""
    lane = cuda_lane()
    for mebibytes in (2, 3, 4, 5):
        call(lane, nbytes=mebibytes << 20)
        gpu.capturing = mebibytes == 3
        call(lane)
        gpu.capturing = False
    assert alive(made["workspaces"]) == [False, True, False, True]


def test_a_lane_that_gets_more_channels_gives_back_what_no_graph_was_captured_with(
    gpu: Gpu, made: dict[str, list[weakref.ref[object]]]
) -> None:
    """The kernels of a graph have the addresses of the old signals, and of the old workspace of the same size."""
    lane = cuda_lane()
    for channels in (9, 10, 11, 12):
        lane.reserve(64, 1.0, 7, channels=channels)
        gpu.capturing = channels in (10, 12)
        call(lane)
        gpu.capturing = False
    lane.reserve(64, 1.0, 7, channels=13)
    assert workspace_of(lane).half == 1 << 20
    assert alive(made["workspaces"]) == alive(made["signals"]) == [False, True, False, True, True]


def test_memory_that_cannot_be_completed_leaves_the_lane_as_it_was(
    gpu: Gpu, made: dict[str, list[weakref.ref[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the larger workspace, and not for the signals of more channels."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of memory")

    lane = cuda_lane()
    before = dict(vars(workspace_of(lane)))
    monkeypatch.setattr(workspace, "CudaSignals", SimpleNamespace(create=fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        lane.reserve(1 << 21, 1.0, 7, channels=9)
    assert vars(workspace_of(lane)) == before
    assert alive(made["workspaces"]) == [False]
    with pytest.raises(RuntimeError, match=r"out of step with its peers since a call failed \(prepare: RuntimeError\)"):
        lane.reserve(64, 1.0, 7)


def test_a_lane_that_goes_away_during_a_capture_keeps_its_memory_until_the_host_may_wait(
    gpu: Gpu, made: dict[str, list[weakref.ref[object]]]
) -> None:
    """To free symmetric memory, torch waits for the device, and during a capture this ends the process."""
    for gpu.capturing in (False, True):
        lane = cuda_lane()
        lane.reserve(1 << 21, 1.0, 7, channels=9)
        del lane
    assert alive(made["workspaces"]) == alive(made["signals"]) == [False, True]
    gpu.capturing = False
    cuda_lane().reserve(1 << 21, 1.0, 7)
    assert alive(made["workspaces"]) == [False, False, False]
    assert alive(made["signals"]) == [False, False]


def test_no_workspace_is_made_during_a_capture_and_the_error_says_what_to_do(gpu: Gpu) -> None:
    lane = cuda_lane()
    gpu.capturing = True
    advice = r"lane 2 .* needs 2000000 bytes .* make the same call inside a block: with symm_overlap.prepare\(\):"
    with pytest.raises(NotPreparedError, match=advice):
        call(lane, nbytes=2_000_000)
    assert not asked_of(lane)
    gpu.capturing = False
    call(lane)  # the lane is still in step, so the advice can be followed


def test_a_workspace_knows_whether_its_device_captures_a_graph(gpu: Gpu) -> None:
    workspace = workspace_of(cuda_lane())
    for gpu.capturing in (False, True):
        assert workspace.capturing() is gpu.capturing


def test_steps_find_the_lanes_device_current(gpu: Gpu) -> None:
    """During a call, the current device is the lane's. Afterwards, it is the same as before."""
    current: list[int] = []
    call(cuda_lane(), lambda half: current.append(gpu.current))
    assert current == [DEVICE.index]
    assert gpu.current == 0


def test_an_error_in_a_call_is_told_to_the_peers_at_once(gpu: Gpu) -> None:
    def fails(half: int) -> None:
        raise MemoryError("no room")

    lane = cuda_lane()
    with pytest.raises(MemoryError):
        call(lane, fails)
    assert [name for name, *_ in asked_of(lane)] == ["begin", "barrier_around_replays", "give_up"]
    assert asked_of(lane)[-1] == ("give_up", "all_gather")
    with pytest.raises(RuntimeError, match="out of step"):
        call(lane)


def test_a_capture_that_has_failed_leaves_the_lane_in_step(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of such a capture ever runs, so no peer can be in the middle of the call."""

    def fail() -> bool:
        raise RuntimeError("the capture of this CUDA graph has failed")

    lane = cuda_lane()
    signals, gpu.capturing = workspace_of(lane)._signals, True
    with monkeypatch.context() as patch:
        patch.setattr(signals, "barrier_around_replays", fail)
        with pytest.raises(CaptureFailedError, match="has failed"):
            call(lane)
    assert [name for name, *_ in asked_of(lane)] == ["begin"]
    gpu.capturing = False
    call(lane)
    monkeypatch.setattr(signals, "barrier_around_replays", fail)
    with pytest.raises(RuntimeError, match="has failed"):
        call(lane)
    assert lane.broken


def test_an_error_before_the_first_call_is_just_that_error(gpu: Gpu) -> None:
    """Without a control block, there is nothing to mark as failed, so the error is raised unchanged."""
    lane = cuda_lane()
    workspace_of(lane)._signals = None
    with pytest.raises(MemoryError), lane.turn("all_gather"):
        raise MemoryError("no room")


class ControlBlocks(CudaSignals):
    """CudaSignals whose constructor does nothing, because there is no GPU."""

    def __init__(self, *arguments: object, **options: object) -> None: ...


def allocate(me: Rank, what: str) -> None:
    if what == "workspace":
        made = CudaWorkspace(me.group, DEVICE, 0, "cuda lane 0")
        made.channels = 1  # as if the control block existed
        made.grow(64, 1)
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
        for module in (workspace, signals):
            patch.setattr(module, "symm_mem", SimpleNamespace(empty=empty))
            patch.setattr(module, "rendezvous", rendezvous)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(_C, "CudaLane", SimpleNamespace(control_words=lambda world, channels: 8), raising=False)
        patch.setattr(signals, "stream_waits", lambda device: False)
        failed = error_of(allocate, me, what)
        assert not meetings, "no rank begins a rendezvous: it would wait for the rank that has no memory"
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
        assert seconds < SOON


def test_room_is_made_under_a_number_of_its_own_and_a_call_that_finds_it_does_not_wait(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growing the workspace has its own number in the sequence of calls.

    Otherwise, a faster peer that is already in the call would take this rank's announcement for a different call.
    """
    lane = cuda_lane()
    monkeypatch.setattr(workspace_of(lane), "grow", lambda nbytes, channels: setattr(lane.workspace, "half", nbytes))
    lane.reserve(1 << 21, 1.0, 9)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("the host waits"))
    monkeypatch.setattr(workspace_of(lane), "grow", lambda nbytes, channels: pytest.fail("room is made"))
    call(lane, nbytes=1 << 21)
    call(lane)
    begun = [asked[1:] for asked in asked_of(lane) if asked[0] == "begin"]
    assert begun == [("prepare", 1.0, 9, 0, False), ("all_gather", 1.0, 7, 1, False), ("all_gather", 1.0, 7, 2, False)]
