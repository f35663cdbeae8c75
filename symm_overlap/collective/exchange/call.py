"""One call of an op: who makes it, under which settings, and how it is carried out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ..._torch import resolve_group, symm_mem
from ...runtime import GroupState, Lane, backend_of, direct_access, lane_group, state_of
from ...settings import Settings
from ..chooser import Choice, choose
from ..comparison import compare_calls
from ..problem import Problem

_ODD = 0x9E3779B97F4A7C15  # spreads the count of calls over all bits of the hash
_64_BITS = (1 << 64) - 1


class Peers:
    """The group that a call is made in, and this process in it.

    Making one counts the call, whether or not its arguments are then rejected: the ranks' counts stay the same as long
    as all of them make the same calls.

    Attributes:
        announced: whether the peers know of this call (`symm_overlap.collective.comparison`).
    """

    __slots__ = ("announced", "group", "number", "rank", "settings", "state", "world")

    def __init__(self, group_name: str, settings: Settings) -> None:
        self.group = resolve_group(group_name)
        self.state: GroupState = state_of(self.group)
        self.settings = settings
        self.rank, self.world = self.state.rank, self.state.world
        self.announced = False
        lane = settings.lane_index
        self.state.calls[lane] = self.number = self.state.calls[lane] + 1

    def hash_of(self, *call: Any) -> int:
        """64 bits that stand for this call, which ``call`` describes, and for this rank's count of calls; never 0."""
        return (_digest(*call) + self.number * _ODD) & _64_BITS or 1


class Call:
    """A call, once its arguments are known to be good.

    Args:
        problem: what is called.
        device: of the tensors.
        shard: what is gathered, flat; None where nothing is.

    Attributes:
        problem: what is called.
        choice: the path, and why.
        symmetric: whether peers can read the shard where it lies.

    Raises:
        RuntimeError: the lane is out of step, or (with checking) ranks make different calls.
        ValueError: the forced path cannot run here.
    """

    def __init__(self, peers: Peers, problem: Problem, device: torch.device, shard: Tensor | None = None) -> None:
        self.op, self.problem, self.peers = problem.op, problem, peers
        self.settings = settings = peers.settings
        self.rank, self.world = peers.rank, peers.world
        self.backend = backend_of(problem.device)
        self.lane: Lane
        state, direct = peers.state, True
        self._rendezvous = 0
        self._hash = 0
        path, chunks, streams = settings.forced_path, settings.chunks, settings.streams
        if peers.world > 1 and not state.fake:
            self.lane = state.lane(peers.group, device, settings.lane_index)
            self.lane.require_in_step()
            if shard is not None and self.backend.traits.in_place:
                self._rendezvous = _C.rendezvous_number(shard, state.name)
            if settings.comparing:
                # First of all: what follows is collective, and a peer may have rejected its arguments.
                compare_calls(peers, self.lane, lambda: _describe(problem, self._rendezvous, path, chunks, streams))
            direct = path != "c10d" and direct_access(state, device, settings.comparing)
            self._hash = peers.hash_of(problem, self._rendezvous, path, chunks, streams)
        self.choice: Choice = choose(problem, settings, direct=direct, fake=state.fake)

    @property
    def symmetric(self) -> bool:
        """Whether peers can read the shard where it lies, in symmetric memory of the group."""
        return self._rendezvous > 0

    def peer_shard(self, shard: Tensor, rank: int, offset: int) -> Tensor:
        """The shard of a rank, which begins so many elements into that rank's symmetric memory."""
        handle = symm_mem.rendezvous(shard, self.peers.state.name)
        return handle.get_buffer(rank, tuple(shard.shape), shard.dtype, offset)

    def run(self, body: Callable[[int], object], outputs: Sequence[Tensor], nbytes: int, channels: int) -> None:
        """See `Lane.run`."""
        self.lane.run(
            self.op,
            body,
            outputs,
            nbytes=nbytes,
            channels=channels,
            seconds=self.settings.seconds,
            call_hash=self._hash,
        )

    @contextmanager
    def turn(self) -> Iterator[dist.ProcessGroup]:
        """The lane's group, for collectives of torch.distributed that belong to this call alone."""
        with self.lane.turn(self.op):
            try:
                yield lane_group(self.peers.state, self.peers.group, self.lane.index, self.settings.seconds)
            except dist.DistBackendError as error:
                raise dist.DistBackendError(f"{self.op}: {error}") from error


@lru_cache(maxsize=4096)
def _digest(*call: Any) -> int:
    """64 bits that are the same in every process: Python's own hashes of strings are not."""
    words = [str(word) for word in call]
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def _describe(problem: Problem, rendezvous: int, path: str | None, chunks: int | None, streams: int | None) -> str:
    """A call in words."""
    text = str(problem)
    if rendezvous:
        text += f" in symmetric memory of rendezvous {rendezvous}"
    forced = {"path": path, "chunks": chunks, "streams": streams}
    if settings := ", ".join(f"{name} {value}" for name, value in forced.items() if value is not None):
        text += f" with forced {settings}"
    return text
