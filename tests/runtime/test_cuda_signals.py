"""What CudaSignals does on the host: names, errors, and the barriers of captured calls. Its kernels: tests/gpu."""

import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError

from symm_overlap import _C
from symm_overlap.runtime.cuda import signals as cuda_signals
from symm_overlap.runtime.cuda.signals import CudaSignals, check_lanes
from symm_overlap.runtime.cuda.watch import Watch

RECORD = SimpleNamespace(
    peer_failed=False,
    gave_up=False,
    peer_died=False,
    mismatch=False,
    op=1,
    call=2,
    peer=3,
    channel=0,
    expected=7,
    found=6,
    found_call=6,
)


class FakeLane:
    """Stands for _C.CudaLane: notes what is launched, and has the failure it is given."""

    def __init__(self, control, peers, rank, world, channels, in_memory) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.record = None
        self.waiting = 0.0  # seconds, at a gate
        self.control, self.peers, self.channels, self.in_memory = control, peers, channels, in_memory

    def failure(self):
        return self.record

    def overdue(self, seconds):
        return bool(self.waiting and seconds < self.waiting)

    def __getattr__(self, name):
        return lambda *arguments: self.launched.append((name, *arguments))


class FakeHandle:
    rank, world_size = 1, 4

    def __init__(self) -> None:
        self.blocks = [torch.zeros(1, dtype=torch.int32) for _ in range(4)]

    def get_remote_tensor(self, peer, sizes, dtype):
        return self.blocks[peer]


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> CudaSignals:
    monkeypatch.setattr(_C, "CudaLane", FakeLane, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_signals, "_lanes", type(cuda_signals._lanes)())
    monkeypatch.setattr(cuda_signals, "_stream_ahead", lambda device: "ahead")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_signals, "_watch", SimpleNamespace(look_after=lambda lane: None))
    return new_signals()


def new_signals() -> CudaSignals:
    return CudaSignals(torch.zeros(1, dtype=torch.int32), FakeHandle(), group_name="tp", lane=2, channels=4)


def test_streams_wait_by_memory_operations_only_when_asked_to(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not signals._lane.in_memory
    monkeypatch.setenv("SYMM_OVERLAP_STREAM_WAITS", "1")
    assert new_signals()._lane.in_memory


def test_the_table_of_peers_holds_every_control_block_by_rank(signals: CudaSignals) -> None:
    blocks = [block.data_ptr() for block in signals._handle.blocks]
    assert signals._lane.peers.tolist() == [blocks[0], signals._lane.control.data_ptr(), blocks[2], blocks[3]]


def test_a_failed_wait_is_raised_by_the_next_call_with_all_that_is_known(signals: CudaSignals) -> None:
    signals.begin("all_gather_matmul", 1.5)
    signals.begin("matmul_reduce_scatter", 0.25)
    assert signals._lane.launched == [("begin", 0, 1, 1_500_000_000, 0, 0), ("begin", 1, 2, 250_000_000, 0, 0)]
    signals.check()

    signals._lane.record = RECORD
    for _ in range(2):  # the lane never works again
        with pytest.raises(DistBackendError) as error:
            signals.begin("all_gather_matmul", 1.5)
    for part in ("matmul_reduce_scatter", "call 2", "'tp'", "lane 2", "rank 1 of 4", "from rank 3", "channel 0"):
        assert part in str(error.value)
    assert "expected epoch 7, found 6" in str(error.value)
    assert "symm_overlap.timeout(" in str(error.value)
    assert len(signals._lane.launched) == 2  # nothing was launched on the failed lane


def test_a_rank_that_was_told_names_the_rank_that_gave_up(signals: CudaSignals) -> None:
    signals.begin("all_gather", 1.0)
    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "peer_failed": True, "op": 0, "peer": 0})
    with pytest.raises(DistBackendError, match="rank 0 gave up on this lane") as error:
        signals.check()
    assert "epoch" not in str(error.value)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (7, "both are call number 7 of their rank, but op, shapes, dtypes or settings differ"),
        (6, "it is in its call number 6, this rank in its call number 7"),
        (-1, "it has announced none, and this rank is in its call number 7"),
    ],
)
def test_a_rank_in_a_different_call_is_named_with_both_numbers(signals: CudaSignals, found: int, said: str) -> None:
    signals.begin("all_gather", 1.0, 1 << 63, 7)
    assert signals._lane.launched == [("begin", 0, 1, 1_000_000_000, 1 << 63, 7)]
    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "mismatch": True, "op": 0, "found_call": found})
    with pytest.raises(DistBackendError, match=f"rank 3 is in a different call: {said}") as error:
        signals.check()
    assert "Set SYMM_OVERLAP_CHECK=1 on every rank to see both calls in full" in str(error.value)


def test_a_captured_call_compares_nothing(signals: CudaSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    signals.begin("all_gather", 1.0, 5, 7)
    assert signals._lane.launched[0] == ("begin", 0, 1, 1_000_000_000, 0, 7)


def test_an_error_on_the_host_fails_the_lane_ahead_of_all_that_is_enqueued(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = signals._lane.launched

    @contextmanager
    def on_stream(stream):
        launched.append(("on", stream))
        yield
        launched.append(("off", stream))

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    signals.begin("all_gather", 1.0)
    launched.clear()
    signals.give_up("all_reduce")  # which may not have begun
    assert launched == [
        ("begin", 1, 1, 1_000_000_000, 0, 0),
        ("on", "ahead"),
        ("give_up",),
        ("hand_over", 0.0),
        ("off", "ahead"),
    ]

    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "gave_up": True, "peer": 1})
    with pytest.raises(DistBackendError, match=r"all_reduce, call 2, .*: an error on the host ended the call") as error:
        signals.check()
    assert "epoch" not in str(error.value)


def test_check_raises_each_lanes_failure_once(signals: CudaSignals) -> None:
    other = CudaSignals(torch.zeros(1, dtype=torch.int32), FakeHandle(), group_name="dp", lane=0, channels=4)
    for lane in (signals, other):
        lane.begin("all_gather", 1.0)
    check_lanes()
    signals._lane.record = other._lane.record = SimpleNamespace(**{**vars(RECORD), "op": 0})
    with pytest.raises(DistBackendError, match="'dp'"):
        check_lanes()
    with pytest.raises(DistBackendError, match="'tp'"):
        check_lanes()
    check_lanes()


def test_a_captured_call_is_between_barriers_on_a_channel_of_their_own(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the first, a replay would overwrite what peers still read; without the last, the next call would.
    output = torch.zeros(1)
    signals.begin("all_gather", 1.0)
    signals.poison([output])
    assert [launch[0] for launch in signals._lane.launched] == ["begin", "poison"]

    signals._lane.launched.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    signals.begin("all_gather", 1.0)
    signals.signal([0], 3)
    signals.poison([output])
    steps = signals._lane.launched
    assert [step[0] for step in steps] == ["begin", "barrier", "signal", "barrier", "poison"]
    assert steps[1] == steps[3] == ("barrier", 4)
    assert signals._lane.channels == 5


def test_the_waits_for_a_rank_that_has_died_are_ended_within_a_second(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: set[int] = set()
    ended = threading.Event()
    monkeypatch.setattr(_C, "death_of", lambda group, peer: "is dead" if group == "tp" and peer in dead else "")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(ended.set()))
    watch = Watch()
    watch.look_after(signals)
    assert not ended.wait(0.6), "nobody has died"
    dead.add(3)
    assert ended.wait(1.0)
    deadline = time.monotonic() + 5
    while len(signals._lane.launched) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert signals._lane.launched == [("mark_dead", 3), ("hand_over", 0.0)]

    signals.begin("all_gather", 1.0)
    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "peer_died": True, "op": 0})
    with pytest.raises(DistBackendError, match=r"rank 3 died before its signal on channel 0 came \(expected epoch 7"):
        signals.check()


def test_a_dead_rank_is_marked_once_and_a_group_that_is_no_more_is_left_alone(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(_C, "death_of", lambda group, peer: "is dead" if peer in (0, 2) else "")
    signals.look()
    signals.look()
    assert sorted(signals._lane.launched) == [("hand_over", 0.0), ("mark_dead", 0), ("mark_dead", 2)]

    def no_group(group: str, peer: int) -> str:
        raise RuntimeError("no such group")

    monkeypatch.setattr(_C, "death_of", no_group)
    signals.look()
    assert len(signals._lane.launched) == 3


def test_a_wait_that_takes_long_is_handed_over_to_the_kernel_that_knows_the_deadline(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "death_of", lambda group, peer: "")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(signals._lane.launched.append("device")))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(signals._lane.launched.append(stream)))
    signals._lane.waiting = 0.9
    signals.look()
    assert signals._lane.launched == []
    signals._lane.waiting = 1.1
    for _ in range(2):  # until the call has ended: the peer may have shut the gate again
        signals._lane.launched.clear()
        signals.look()
        assert signals._lane.launched == ["device", "ahead", ("hand_over", 1.0)], "no context on another GPU"


def test_a_lane_lives_no_longer_for_being_looked_after() -> None:
    class Lane:
        def look(self) -> None: ...

    watch, lane = Watch(0.01), Lane()
    watch.look_after(lane)
    time.sleep(0.1)
    gone = weakref.ref(lane)
    del lane
    deadline = time.monotonic() + 5
    while (gone() is not None or watch._thread is not None) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None
    assert watch._thread is None, "and the thread ends with the last lane"
