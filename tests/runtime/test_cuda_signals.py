"""What CudaSignals does on the host: names, errors, and the work before calls. tests/gpu tests its kernels."""

import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from symm_overlap import _C
from symm_overlap.runtime.cuda import signals as cuda_signals
from symm_overlap.runtime.cuda.signals import CudaSignals, check_lanes
from tests.ranks import Pool, Rank

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
    """Replaces _C.CudaLane. It records what is launched, and reports the failure that a test sets as ``record``."""

    def __init__(self, control, peers, rank, world, channels, group_name, hosts) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.record, self.capturing = None, False
        self.control, self.peers, self.channels, self.group_name, self.hosts = (
            control,
            peers,
            channels,
            group_name,
            hosts,
        )

    @staticmethod
    def control_words(world, channels):
        return 8

    def failure(self):
        return self.record

    def begin(self, *arguments):
        self.launched.append(("begin", *arguments))
        return self.capturing

    def end(self, outputs, flags):
        self.launched.append(("end", outputs))
        return not self.capturing

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
    monkeypatch.setattr(cuda_signals, "_lanes", type(cuda_signals._lanes)())
    monkeypatch.setattr(cuda_signals, "stream_ahead", lambda device: "ahead")
    return CudaSignals(torch.zeros(1, dtype=torch.int32), FakeHandle(), group_name="tp", lane=2, channels=4)


def test_the_table_of_peers_holds_every_control_block_by_rank(signals: CudaSignals) -> None:
    blocks = [block.data_ptr() for block in signals._handle.blocks]
    assert signals._lane.peers.tolist() == [blocks[0], signals._lane.control.data_ptr(), blocks[2], blocks[3]]


def test_signals_that_go_away_wait_for_the_device(signals: CudaSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_signals, "let_go", lambda held, device: asked.append((held["_lane"], device)))
    lane, control = signals._lane, signals._lane.control
    signals.__del__()
    assert asked == [(lane, control.device)]


def test_a_failed_wait_is_raised_by_the_next_call_with_all_that_is_known(signals: CudaSignals) -> None:
    signals.begin("all_gather_matmul", 1.5)
    signals.begin("matmul_reduce_scatter", 0.25, by_kernels=True)
    assert signals._lane.launched == [
        ("begin", 0, 1, 1_500_000_000, 0, 0, False),
        ("begin", 1, 2, 250_000_000, 0, 0, True),
    ]
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
    """A rank that was notified of a failure reports the rank where it began, and no epochs."""
    signals.begin("all_gather", 1.0)
    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "peer_failed": True, "op": 0, "peer": 0})
    with pytest.raises(DistBackendError, match="rank 0 gave up on this lane") as error:
        signals.check()
    assert "epoch" not in str(error.value)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (7, "both are call number 8 of their rank, but op, shapes, dtypes or settings differ"),
        (6, "it is in its call number 7, this rank in its call number 8"),
        (-1, "it has not announced a call, and this rank is in its call number 8"),
    ],
)
def test_a_rank_in_a_different_call_is_named_with_both_numbers(signals: CudaSignals, found: int, said: str) -> None:
    signals.begin("all_gather", 1.0, 1 << 63, 7)
    assert signals._lane.launched == [("begin", 0, 1, 1_000_000_000, 1 << 63, 7, False)]
    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "mismatch": True, "op": 0, "found_call": found})
    with pytest.raises(DistBackendError, match=f"rank 3 is in a different call: {said}") as error:
        signals.check()
    assert "Set SYMM_OVERLAP_CHECK=1 on every rank to see both calls in full" in str(error.value)


def test_an_error_on_the_host_fails_the_lane_ahead_of_all_that_is_enqueued(
    signals: CudaSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that fails the lane runs on a separate stream, so it is not queued behind earlier work."""
    launched = signals._lane.launched

    @contextmanager
    def on_stream(stream):
        launched.append(("on", stream))
        yield
        launched.append(("off", stream))

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    signals.begin("all_gather", 1.0)
    launched.clear()
    signals.give_up("all_reduce")  # an op whose call may not have begun
    assert launched == [
        ("on", "ahead"),
        ("give_up", 1, 1),
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


@pytest.mark.parametrize("capturing", [False, True])
def test_a_call_is_kept_apart_from_replays_on_a_channel_that_no_plan_uses(
    signals: CudaSignals, capturing: bool
) -> None:
    """The barriers that separate calls from replays use an extra channel, behind those of the plans."""
    signals._lane.capturing, output = capturing, torch.zeros(1)
    assert signals.begin("all_gather", 1.0) is capturing
    signals.barrier_around_replays()
    signals.signal([0], 3)
    assert signals.end([output]) is not capturing
    assert signals._lane.launched[1:] == [
        ("barrier_around_replays", 4),
        ("signal", [0], 3),
        ("end", [output]),
    ]
    assert signals._lane.channels == 5


def test_a_rank_that_has_died_is_named(signals: CudaSignals) -> None:
    signals.begin("all_gather", 1.0)
    signals._lane.record = SimpleNamespace(**{**vars(RECORD), "peer_died": True, "op": 0})
    with pytest.raises(DistBackendError, match=r"rank 3 died before its signal on channel 0 came \(expected epoch 7"):
        signals.check()


def host_block_of(me: Rank, able: Sequence[bool], room: Sequence[bool], tag: str) -> list[int] | None:
    """Return what the ranks have written into the host block of rank 0, or None if there is no shared host block."""
    block, empty = None, cuda_signals.symm_mem.empty

    def empty_here(*size: int, **options: Any) -> torch.Tensor:
        if not room[me.rank]:
            raise RuntimeError("no room")
        return empty(*size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_signals, "symm_mem", SimpleNamespace(empty=empty_here))
        patch.setattr(cuda_signals, "stream_waits", lambda device: able[me.rank])
        block = cuda_signals._host_block(me.world, me.group, torch.device("cuda", 0), tag)
    if block is None:
        return None
    assert block.tolist() == [0] * me.world
    handle = torch.distributed._symmetric_memory.rendezvous(block, me.group)
    handle.barrier()
    handle.get_remote_tensor(0, [me.world], block.dtype)[me.rank] = 1 + me.rank
    handle.barrier()
    found: list[int] = handle.get_remote_tensor(0, [me.world], block.dtype).tolist()
    return found


def test_hosts_share_a_block_where_all_ranks_have_memory_operations_and_room(
    ranks: Pool,
) -> None:
    yes = (True, True, True)
    assert ranks.run(3, host_block_of, yes, yes, "all") == [[1, 2, 3]] * 3
    assert ranks.run(3, host_block_of, (True, False, True), yes, "one cannot") == [None] * 3
    assert ranks.run(3, host_block_of, yes, (True, True, False), "no room on one") == [None] * 3


def hosts_of_lanes(me: Rank, refused: dict[int, Exception], tag: str) -> tuple[list[int], list[str]]:
    """Return the number of host blocks in each attempt to create this rank's lane, and the warnings."""
    empty, tried = cuda_signals.symm_mem.empty, []

    class Lane(FakeLane):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            tried.append(len(self.hosts))
            if self.hosts and me.rank in refused:
                raise refused[me.rank]

    def empty_here(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return empty(*size, dtype=dtype, device=torch.device("cpu"))

    symm_mem = SimpleNamespace(empty=empty_here, rendezvous=cuda_signals.symm_mem.rendezvous)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(_C, "CudaLane", Lane, raising=False)
        for name, value in (("symm_mem", symm_mem), ("stream_waits", lambda _: True), ("stream_ahead", lambda _: "")):
            patch.setattr(cuda_signals, name, value)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        device = torch.device("cuda", 0)
        made = CudaSignals.create(me.group, device, lane=0, tag=tag, channels=4)
    assert len(made._lane.hosts) == tried[-1]
    return tried, [str(one.message) for one in said]


def test_kernels_wait_on_all_ranks_where_one_may_not_pin_shared_memory(ranks: Pool) -> None:
    assert ranks.run(3, hosts_of_lanes, {}, "all pin") == [([1], [])] * 3
    refused = {1: RuntimeError("it cannot be pinned"), 2: MemoryError()}
    first, second, third = ranks.run(3, hosts_of_lanes, refused, "two may not pin")
    assert first == ([1, 0], [])
    for (tried, (said,)), why in ((second, "RuntimeError: it cannot be pinned"), (third, "MemoryError: ")):
        assert tried == [1, 0]
        assert "kernels wait for signals in group" in said
        assert said.endswith(why)
