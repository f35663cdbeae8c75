"""Epoch signals between the ranks of a group on GPUs, and what becomes of a wait that passes its deadline.

A lane's control block (csrc/common/control_block.h) is in symmetric memory on every rank; here are its kernels and its
names. A kernel cannot raise. A wait that passes its deadline, or whose peer says that one of *its* waits did, returns
and

1. tells every peer, so that nobody takes what follows for a result, and nobody waits for a rank that has given up;
2. marks the lane as failed: its later waits return at once, and the last kernel of the call fills the outputs with NaN;
3. writes who waited for whom into pinned host memory, where the next call on the lane, or `check_lanes`, finds it and
   raises.

Where all ranks can, calls that are not captured signal and wait without kernels, by memory operations of their streams
in memory of the hosts (`_host_block`), unless their kernels read the peers' memory anyway (`meets_in_kernels`). Such a
wait holds no multiprocessor, and knows no deadline; a thread of the host does for it what is said above
(csrc/common/host_lane.h). Ten times a second, that thread also looks whether the processes of peers live, for waits of
either kind.

An error on the host, in the middle of a call, does the same.

The CUDA context stays usable, and so do other lanes and groups. The lane itself is out of step with its peers for good.

**CUDA graphs.** The counters of epochs are in device memory, so a replay counts on. The half of the workspace that a
call uses is fixed at capture, though. Within a graph calls use the halves in turn, as they do outside of one. But the
first call of a graph may follow any other, also itself, and the host, which alternates the halves of the calls that it
issues, does not see the replays. So there are barriers that other calls do not need: one ahead of the first call of a
graph, and, on a lane that graphs were captured with, one ahead of each call that the host issues. The latter finds in
the control block whether there was a replay since the last such call, and lets the ranks meet only then. Either is for
the memory that the call writes to: every peer has finished whatever came before it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial

import torch
from torch.distributed import DistBackendError, ProcessGroup

from ... import _C
from ..._torch import SymmetricMemory, symm_mem
from ..symmetric import on_every_rank, rendezvous
from .memory_operations import stream_waits

SLEEP_CYCLES = 100  # of the sleep step: enough for the other stream's kernel to be picked first, nothing to a matmul
_MASK = 0xFFFFFFFF  # the record's numbers have 32 bits
_lanes: weakref.WeakSet[CudaSignals] = weakref.WeakSet()
_lanes_guard = threading.Lock()
_CPU = torch.device("cpu")
_MOST_RANKS = 256  # that signal and wait by memory operations (kMostRanks in csrc/cuda)


class CudaSignals:
    """The signals of one lane: every method enqueues one small kernel, or memory operations, on the current stream.

    The n-th `wait` for a (peer, channel) passes once that peer's n-th `signal` to this rank on the channel has come;
    what the peer's stream did before is then visible to what follows here. Either is for one peer or for several, each
    at most once: a wait for several passes once the signals of all of them have come. All signals of one (peer,
    channel) must come from one stream, or from streams ordered by events, and so must all its waits.

    Args:
        control: this rank's control block, as `create` makes it.
        handle: what the rendezvous of ``control`` returned.
        group_name, lane: of this lane.
        channels: channels 0 to channels - 1 may be used, the same number on every rank.
        hosts: this rank's host block, as `_host_block` makes it, or pinned tensors of all ranks that are in this
            process; on every rank or on none.

    Raises:
        ValueError: ``control``, or one of ``hosts``, does not have the size or dtype for this world size and number of
            channels.
    """

    def __init__(
        self,
        control: torch.Tensor,
        handle: SymmetricMemory,
        *,
        group_name: str,
        lane: int,
        channels: int,
        hosts: Sequence[torch.Tensor] = (),
    ) -> None:
        self.rank, self.world = handle.rank, handle.world_size
        self._where = f"group {group_name!r} (lane {lane}), rank {self.rank} of {self.world}"
        self._handle = handle  # keeps the peers' blocks mapped
        addresses = [
            control.data_ptr() if peer == self.rank else handle.get_remote_tensor(peer, [1], control.dtype).data_ptr()
            for peer in range(self.world)
        ]
        peers = torch.tensor(addresses, dtype=torch.int64, device=control.device)
        self._replays = channels  # one more channel, for the barriers ahead of calls
        self._lane = _C.CudaLane(control, peers, self.rank, self.world, channels + 1, group_name, hosts)
        self._ahead = _stream_ahead(control.device)
        self._ops: list[str] = []
        self._calls = 0
        self._reported = False
        # Straight to the binding: these run at every step of a plan.
        self.signal: Callable[[Sequence[int], int], None] = self._lane.signal
        self.wait: Callable[[Sequence[int], int], None] = self._lane.wait
        self.barrier: Callable[[int], None] = self._lane.barrier
        self.sleep: Callable[[int], None] = self._lane.sleep
        with _lanes_guard:
            _lanes.add(self)

    @classmethod
    def create(cls, group: ProcessGroup, device: torch.device, *, lane: int, tag: str, channels: int) -> CudaSignals:
        """Allocate the control blocks and make them known to all ranks. Collective among the calls with this ``tag``.

        Not while a CUDA graph is being captured.

        Raises:
            RuntimeError: there is no room for it, on this rank or (`torch.distributed.DistBackendError`) on another.
        """
        words = _C.CudaLane.control_words(group.size(), channels + 1)

        def zeros() -> torch.Tensor:
            block: torch.Tensor = symm_mem.empty(words, dtype=torch.int32, device=device).zero_()
            # Zero before the rendezvous tells the peers where it is: no signal can come earlier and be wiped out.
            torch.cuda.synchronize(device)
            return block

        control = on_every_rank(zeros, group, tag)
        handle = rendezvous(control, group)
        lane_on = partial(cls, control, handle, group_name=group.group_name, lane=lane, channels=channels)
        host = _host_block(words, group, device, tag)
        pinned = None if host is None else _if_no_rank_fails(partial(lane_on, hosts=(host,)), group, tag)
        return on_every_rank(lane_on, group, tag) if pinned is None else pinned

    @cached_property
    def driver(self) -> _C.CudaDriver:
        """What issues programs on this lane; see csrc/cuda/driver.h."""
        return _C.CudaDriver(self._lane, SLEEP_CYCLES)

    def begin(self, op: str, timeout: float, call_hash: int = 0, number: int = 0, by_kernels: bool = False) -> None:
        """Before the first step of a call, on the caller's stream.

        Args:
            op: name of the op, for the errors of the call's waits.
            timeout: seconds that each wait of the call may last, counted on the GPU from when it starts there. A
                captured graph keeps the timeout of its capture.
            call_hash: of everything that must be the same on every rank, 64 bits, not negative; 0 compares nothing. A
                captured call compares nothing either, as nobody knows when it will be replayed.
            number: this rank's count of the calls that have run on the lane: one more with every call that is not
                captured, whatever becomes of the workspace.
            by_kernels: whether kernels signal and wait also where streams could do without, on every rank.

        Raises:
            DistBackendError: an earlier wait of the lane has failed; see `check`.
        """
        self.check()
        self._calls += 1
        capturing = torch.cuda.is_current_stream_capturing()
        self._begin(op, timeout, 0 if capturing else call_hash, number, by_kernels)

    def keep_apart_from_replays(self) -> bool:
        """Behind `begin`, before the call touches the workspace: the barriers of which the module's text speaks, where
        they are needed. Whether the call is captured, and the first one of a graph.
        """
        first: bool = self._lane.keep_apart_from_replays(self._replays)
        return first

    def poison(self, outputs: Sequence[torch.Tensor]) -> None:
        """After the last step of a call, on the caller's stream: fill the outputs with NaN if a wait has failed.

        Args:
            outputs: dense tensors, contiguous or a permutation of contiguous. Every byte becomes 0xFF, which is a NaN
                in each floating-point dtype and -1 in integers.
        """
        self._lane.poison(outputs, not torch.cuda.is_current_stream_capturing())

    def give_up(self, op: str) -> None:
        """After an error on the host, in a call of ``op``: end every wait of the lane, here and at the peers."""
        self._begin(op, 1.0)
        # Not behind the call's own waits, some of which may be for what peers do once they have been told.
        with torch.cuda.stream(self._ahead):
            self._lane.give_up()

    def _begin(self, op: str, timeout: float, call_hash: int = 0, number: int = 0, by_kernels: bool = False) -> None:
        if op not in self._ops:
            self._ops.append(op)
        numbers = self._ops.index(op), self._calls & _MASK, round(timeout * 1e9), call_hash, number & _MASK
        self._lane.begin(*numbers, by_kernels)

    def check(self) -> None:
        """Raise if a wait of the lane has failed, as far as the host can see without synchronising.

        Raises:
            DistBackendError: it names op, group, rank, peer, channel, and the expected and the found epoch.
        """
        record = self._lane.failure()
        if record is not None:
            self._reported = True
            raise DistBackendError(self._describe(record))

    def _describe(self, record: _C.FailureRecord) -> str:
        peer = record.peer
        if record.gave_up:
            why = "an error on the host ended the call, and says itself what happened."
        elif record.peer_failed:
            why = f"rank {peer} gave up on this lane, and says itself why."
        elif record.peer_died:
            why = (
                f"rank {peer} died before its signal on channel {record.channel} came (expected epoch "
                f"{record.expected}, found {record.found}). Its own output says why it ended; this group cannot go on."
            )
        elif record.mismatch:
            why = _C.different_call(f"rank {peer}", record.found_call, record.expected)
        else:
            why = (
                f"no signal from rank {peer} on channel {record.channel} by the deadline: expected epoch "
                f"{record.expected}, found {record.found}. Rank {peer} is late, has failed, or called another op: see "
                "its log. If it is only slow, raise the limit with symm_overlap.timeout(seconds)."
            )
        return (
            f"symm_overlap: {self._ops[record.op]}, call {record.call}, {self._where}: {why} The outputs of this "
            "and of later calls on the lane, and of earlier ones that were still running, are filled with NaN. Other "
            "lanes and groups are not affected."
        )


def _host_block(words: int, group: ProcessGroup, device: torch.device, tag: str) -> torch.Tensor | None:
    """Memory for the host block of a lane (csrc/common/control_block.h), which the processes of all ranks share.

    None on every rank where there are too many, or where one of them has no memory operations or no room. Collective
    among the calls with this ``tag``.
    """
    if group.size() > _MOST_RANKS:
        return None
    block = None
    with suppress(RuntimeError):  # no room, or CUDA itself has failed: the peers are told in either case
        if stream_waits(device):
            block = symm_mem.empty(words, dtype=torch.int32, device=_CPU)
    able = _C.exchange(group.group_name, "memory operations", "" if block is None else "yes", tag)
    if block is None or not all(able):
        return None
    _C.rendezvous(block, group.group_name, tag)
    return block


def _if_no_rank_fails(lane: Callable[[], CudaSignals], group: ProcessGroup, tag: str) -> CudaSignals | None:
    """A lane with host blocks, which each rank pins for its GPU; None on every rank where one of them may not.

    How much memory a process may pin is limited (by ``ulimit -l`` or a container), and may be less than the lane needs,
    which is more than `stream_waits` has tried. A rank that fails warns, since kernels that wait hold multiprocessors.
    Collective among the calls with this ``tag``.
    """
    made, failure = None, ""
    try:
        made = lane()
    except Exception as error:  # whatever it is, peers wait for the answer; an error of another kind comes again
        failure = f"{type(error).__name__}: {error}"
    failures = _C.exchange(group.group_name, "pinned memory", failure, tag)
    if failure:
        warnings.warn(f"symm_overlap: kernels wait for signals in group {group.group_name!r}: {failure}", stacklevel=2)
    return None if any(failures) else made


@cache
def _stream_ahead(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nothing ever waits. One for all lanes: streams are not free, as they share hardware queues."""
    return torch.cuda.ExternalStream(_C.new_cuda_stream(device.index, True), device)


def check_lanes() -> None:
    """Raise if a wait of any lane of this process has failed; each lane's failure is raised here once.

    Raises:
        DistBackendError: see `CudaSignals.check`.
    """
    with _lanes_guard:
        lanes = sorted(_lanes, key=lambda lane: lane._where)
    for lane in lanes:
        if not lane._reported:
            lane.check()
