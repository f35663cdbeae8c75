"""What the layers above ask of a device. There is one `Backend` for each kind of device, and it is the only place where
kinds of devices differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan import Plan, Region, Step, Streams
from .costs import Device, DeviceCosts
from .script import Script
from .work import WorkOf

if TYPE_CHECKING:
    from .group import GroupState


@dataclass(frozen=True)
class Traits:
    """What the choice of a path depends on. Known for every kind of device, whether or not there is one here.

    Attributes:
        device: the kind, as in ``torch.device.type``.
        in_place: whether a matmul can read a peer's memory where it lies. Otherwise shards are copied first.
        announces: whether the host can read what a peer has written in a call, and so learn where its input lies.
            Otherwise an input that peers read in place lies at the same place in its memory on every rank.
        streams: compute streams of a pipelined call.
        copy_stream: whether copies have a stream of their own. A CPU copies on the core that multiplies.
        library_collectives: whether a collective that nothing hides is better left to torch.distributed's library.
        costs: what operations cost on the devices of this kind that are known, the one that stands for others first.
            From these a path is predicted; where there are none, measured thresholds decide.
        fewest_rows: with fewer rows in each rank's part, one matmul is quicker than what chunks would hide.
        most_bytes_in_one_shot: up to so many bytes of partial results, of all ranks together, every rank sums all of
            them; more are shared out.
        most_bytes_in_one_launch: up to so many bytes of one rank are copied to where peers can read them, to be summed
            in rank order by a kernel that does, even where there is a library. More would keep too much memory, and
            the copy would take longer than what it spares.
        most_ranks_in_a_sum: ranks whose partial results can be summed; None: any number.
        kernels: whether fused kernels are compiled, so that they may be quick. Otherwise they are interpreted.
        divides_by_result_scale: whether torch divides a product in float8 by its result scale. Otherwise it multiplies.
    """

    device: str
    in_place: bool
    announces: bool
    streams: int
    copy_stream: bool
    library_collectives: bool
    costs: tuple[DeviceCosts, ...]
    fewest_rows: int
    most_bytes_in_one_shot: int
    most_bytes_in_one_launch: int
    most_ranks_in_a_sum: int | None
    kernels: bool
    divides_by_result_scale: bool


class Workspace(Protocol):
    """The symmetric memory of one lane, in two halves, and the signals between its ranks.

    A call uses one half. `Lane` says why two are enough.

    Attributes:
        half: bytes of a half; 0 before the first call.
        channels: on how many channels ranks can signal.
    """

    half: int
    channels: int

    def guarded(self, lock: threading.Lock) -> AbstractContextManager[object]:
        """What every call enters: ``lock``, and whatever else it needs around it."""

    def require_preparable(self, what: str) -> None:
        """Raises NotPreparedError, which says ``what`` is missing, if nothing can be made now."""

    def require_capturable(self, what: str) -> None:
        """Raises RuntimeError, which says ``what`` was called, if a CUDA graph is being captured, of which the
        collectives of the group's library cannot be a part.
        """

    def grow(self, nbytes: int, channels: int) -> None:
        """Make new halves of at least ``nbytes``. Collective."""

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in half ``parity`` of the workspace of ``rank``, ``offset`` bytes into the half."""

    def place(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor ``offset`` bytes into the workspace of ``rank``, both halves taken as one.

        For a lane whose calls say themselves which memory they use, and when it may be used again.
        """

    def memory(self) -> object:
        """What keeps the memory of this rank mapped. Tensors in it do not: they are only views."""

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """Start a call.

        Args:
            op: for messages.
            seconds: the deadline of each wait.
            call_hash: 64 bits that are the same on all ranks that make the same call; 0 compares nothing.
            number: how many calls on this workspace came before.
            by_kernels: whether signals and waits are kernels even where a stream could do without.
        """

    def take_half(self, number: int) -> int:
        """Take a half, 0 or 1, for the call of this number, which has begun: on every rank the same one. Every peer has
        finished the calls that used it before, or will have by the time that the call's own steps come to run.
        """

    def steps(self) -> dict[str, Callable[[Step], object]]:
        """What runs the steps in which ranks meet."""

    def script(
        self,
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        streams: Streams,
    ) -> Script | None:
        """The plan made ready to be issued without Python, as far as that can be; None where it cannot.

        Args:
            at: the view of a region. Those in the workspace stay where they are until it grows.
            tensors: by buffer, the caller's tensors and scratch memory that copies touch: contiguous ones, which may
                lie elsewhere in the next call.
            operands: further tensors of the caller's that steps compute with: of any strides, and where ranks may have
                different numbers of rows, in each call of other sizes.
            work: what a step computes, with ``tensors``, ``operands`` and views of the workspace.
            streams: what runs the lane's plans otherwise.
        """

    def end(self, outputs: Sequence[Tensor]) -> int:
        """Finish a call: nobody may take the outputs of a failed wait for a result. 0 if only captured, else 1."""

    def give_up(self, op: str) -> None:
        """End every wait for a signal on this lane, here and at the peers, now and later."""

    def gone(self, peer: int) -> str:
        """Why nothing more will come from ``peer``, as far as is known; empty while something may."""


class Backend(Protocol):
    """One kind of device.

    Attributes:
        traits: see `Traits`.
    """

    traits: Traits

    def facts(self, device: torch.device) -> dict[str, Any]:
        """What a rank tells its peers so that all know whether they can reach each other's memory; see `topology`."""

    def described(self, device: torch.device, use: bool = True) -> Device:
        """What decides which costs the device has; without a name where there is no such device here.

        Args:
            use: whether this process may begin to use the device to find out, which takes memory there. Otherwise the
                usual is said of what only its use would tell.
        """

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done what it was given."""

    def workspace(self, group: dist.ProcessGroup, device: torch.device, lane: int, tag: str) -> Workspace:
        """The workspace of a new lane; it has no memory yet."""

    def streams(self, device: torch.device, abandon: Callable[[], object]) -> Streams:
        """What runs the plans of a lane. ``abandon`` ends the waits of a run that has failed."""

    def resolve(self, device: torch.device) -> torch.device:
        """``device`` with its index. Raises ValueError where there is none."""

    def rendezvous_number(self, tensor: Tensor, group: GroupState) -> int:
        """Which rendezvous of the group the memory of a tensor has had; 0 where peers cannot read it."""

    def new_output(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor with the dtype and device of ``like``."""

    def copy(self, target: Tensor, source: Tensor) -> object:
        """``target.copy_(source)``."""

    def keep_for_current_stream(self, tensor: Tensor) -> None:
        """See that the memory of ``tensor`` is not used anew before what the current stream has been given is done."""

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> object:
        """``torch.mm(a, b, out=out)``, or ``out.addmm_(a, b)``. Where ``out`` has another dtype, the product is rounded
        to that of the factors before it is copied or added.
        """

    def multiply_shards(self, shards: Sequence[Tensor], Bs: Sequence[Tensor], products: Sequence[Tensor]) -> None:
        """``product = torch.cat(shards) @ B`` for each weight and product, reading the shards where they lie."""

    def calls_torch(self, dtype: torch.dtype) -> bool:
        """Whether every matmul of this dtype is torch's own."""

    def sum(self, partials: list[Tensor], average: bool, out: Tensor, copy: Tensor | None = None) -> None:
        """``out = copy = `` the sum (or mean) of ``partials``, in their order, accumulated in float32 or wider."""

    def machine(self, device: torch.device) -> tuple[int, int]:
        """What Triton kernels run on: the compute capability of a GPU times 10, and how many multiprocessors it has;
        0 and 2 for Triton's interpreter, in which a persistent kernel then has one program.
        """

    def multiplies_float8(self, device: torch.device) -> bool:
        """Whether torch multiplies float8 numbers with scales on this device."""

    def raise_failures(self) -> None:
        """Raise if a wait of an earlier call has failed, as far as the host knows by now."""
