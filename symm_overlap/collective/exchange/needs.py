"""The resources that calls will need: noted by calls that run nothing, and then allocated (`symm_overlap.prepare`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...runtime import Lane, call_hash
from ...settings import current
from . import c10d
from .call import Call
from .fused.flagged import flags_of
from .route import digest_of


@dataclass
class _Need:
    call: Call  # the lane's first call
    nbytes: int = 0
    channels: int = 0
    collectives: bool = False
    flags: int = 0
    kernels: list[Callable[[], None]] = field(default_factory=list)


class Needs:
    """The needs that have been noted for each lane, in the order of the lanes' first calls, which all ranks share."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, _Need] = {}

    def _of(self, call: Call) -> _Need:
        return self._lanes.setdefault(call.lane, _Need(call))

    def workspace(self, call: Call, nbytes: int, channels: int) -> None:
        """Note that a call needs ``nbytes`` of workspace and so many channels; see `Lane.run`."""
        need = self._of(call)
        need.nbytes, need.channels = max(need.nbytes, nbytes), max(need.channels, channels)

    def collectives(self, call: Call) -> None:
        """Note that a call uses the collectives of its lane's group."""
        self._of(call).collectives = True

    def kernel(self, call: Call, flags: int, load: Callable[[], None]) -> None:
        """Note that a call launches a fused kernel with so many flags.

        Args:
            load: a function that loads the kernel on the current device. It is called after the flags are allocated.
        """
        need = self._of(call)
        need.flags = max(need.flags, flags)
        need.kernels.append(load)

    def make(self) -> None:
        """Allocate everything that has been noted. This is collective for a lane that does not have all of it yet.

        Raises:
            torch.distributed.DistBackendError: ranks need different sizes, or a peer has died or did not come.
            RuntimeError: there is not enough memory on this rank or on another, or an earlier call on a lane failed.
            Any error that Triton raises when it compiles a kernel. The lanes are then ready except for that kernel.
        """
        for lane, need in self._lanes.items():
            if need.channels:
                digest = call_hash(digest_of("prepare"), need.call.peers.number)
                lane.reserve(need.nbytes, current().seconds, digest, channels=need.channels)
            if need.collectives:
                c10d.connect(need.call)
        # Last, because no peer waits for it.
        backends = {
            lane.device: need.call.backend for lane, need in self._lanes.items() if not lane.workspace.capturing()
        }
        for device, backend in backends.items():
            backend.load_matmuls(device)
        for lane, need in self._lanes.items():
            if need.flags:
                with lane.lock:
                    for captured in (False, True):
                        flags_of(need.call, need.flags, captured).prepare(need.flags)
                    for load in need.kernels:
                        load()
