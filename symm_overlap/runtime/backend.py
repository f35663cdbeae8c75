"""The interface between the layers above and a device. There is one `Backend` for each kind of device, and it is the
only place where kinds of devices differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..plan import Plan, Region, Step, Streams
from .costs import Device, DeviceCosts
from .script import Script
from .work import WorkOf

if TYPE_CHECKING:
    from .group import GroupState


@dataclass(frozen=True)
class Traits:
    """The properties of a kind of device that the choice of a path depends on. They are known for every kind, whether
    or not this machine has such a device.

    Attributes:
        device: the kind of device, as in ``torch.device.type``.
        in_place: whether a matmul can read a peer's memory directly. Otherwise shards are copied first.
        announces_offset: whether the host can read what a peer wrote in a call, and so learn where the peer's input is
            stored. If it cannot, an input that peers read in place must have the same offset in its memory on every
            rank.
        streams: how many compute streams a pipelined call uses.
        copy_stream: whether copies have their own stream. A CPU copies on the core that multiplies.
        library_collectives: whether a collective that overlaps with no other work is better left to torch.distributed's
            library.
        costs: what operations cost on each known device of this kind. The first record is also used for unknown
            devices. Paths are predicted from these costs. If the tuple is empty, measured thresholds decide.
        fewest_rows: with fewer rows than this in each rank's part, one matmul costs less than chunks would save by
            overlap.
        most_bytes_in_one_shot: up to this many bytes of partial results, of all ranks together, every rank sums all of
            them. Beyond that, each rank sums its own part.
        most_bytes_in_one_launch: up to this many bytes of one rank are copied to where peers can read them, and a
            kernel sums them in rank order, even if a library collective exists. More would occupy too much memory, and
            the copy would take longer than the time it saves.
        most_ranks_in_a_sum: the largest number of ranks whose partial results can be summed; None: any number.
        kernels: whether fused kernels are compiled, and so can be fast. Otherwise they run in Triton's interpreter.
        divides_by_result_scale: whether torch divides a float8 product by its result scale. Otherwise it multiplies.
        int8_weights: whether Inductor has a kernel that multiplies by int8 weights without converting them.
        float8_rows_to_try: with how many rows torch shows whether it can multiply float8 matrices of a layout.
    """

    device: str
    in_place: bool
    announces_offset: bool
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
    int8_weights: bool
    float8_rows_to_try: int


class Workspace(Protocol):
    """The symmetric memory of one lane, in two halves, and the signals between its ranks.

    A call uses one half. `Lane` explains why two halves are enough.

    Attributes:
        half: the size of a half in bytes; 0 before the first call.
        channels: the number of channels on which ranks can signal.
    """

    half: int
    channels: int

    def guarded(self, lock: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Return the context that every call enters: ``lock``, and anything else the device needs around a call."""

    def capturing(self) -> bool:
        """True if a CUDA graph is being captured, on the current stream of the lane's device."""

    def require_preparable(self, what: str) -> None:
        """Raise NotPreparedError, with ``what`` (what is missing) in its message, if nothing can be allocated now."""

    def require_capturable(self, what: str) -> None:
        """Raise NotCapturedError, with ``what`` (the call) in its message, if a CUDA graph is being captured and the
        collectives of the group's library cannot be captured.
        """

    def grow(self, nbytes: int, channels: int) -> None:
        """Replace the halves by new ones of at least ``nbytes`` each. Collective."""

    def view(self, rank: int, parity: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, ``offset`` bytes into half ``parity`` of the workspace of ``rank``."""

    def place(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor ``offset`` bytes into the workspace of ``rank``, with both halves treated as one.

        This is for a lane whose calls decide themselves which memory they use and when it may be reused.
        """

    def memory(self) -> object:
        """Return an object that keeps the memory of this rank mapped, until it goes away, which may happen at any time.
        Tensors in the memory do not: they are only views.
        """

    def begin(self, op: str, seconds: float, call_hash: int, number: int, by_kernels: bool = False) -> None:
        """Start a call.

        Args:
            op: name of the op, for messages.
            seconds: the time limit of each wait.
            call_hash: 64 bits that are the same on all ranks that make the same call; 0: calls are not compared.
            number: the number of earlier calls on this workspace.
            by_kernels: whether signals and waits are kernels, even if the stream could use memory operations instead.
        """

    def take_half(self, number: int) -> int:
        """Choose the half, 0 or 1, for the call with this number, which has begun. Every rank chooses the same half.
        Every peer has finished the earlier calls that used it, or will have finished them before the steps of this call
        run. Raises CaptureFailedError if the call would belong to a capture that has failed.
        """

    def steps(self) -> dict[str, Callable[[Step], object]]:
        """Return the functions that run the steps in which ranks meet, by kind of step."""

    def script(
        self,
        plan: Plan,
        at: Callable[[Region], Tensor],
        tensors: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        work: WorkOf,
        streams: Streams,
    ) -> Script | None:
        """Return the plan compiled so that it is issued without Python as far as possible; None if this is not
        possible.

        Args:
            at: returns the view of a region. Views in the workspace keep their addresses until the workspace grows.
            tensors: by buffer, the caller's tensors and scratch memory that copies read or write. They are contiguous,
                and may have other addresses in the next call.
            operands: further tensors of the caller that steps compute with. They may have any strides. If ranks may
                have different numbers of rows, their sizes differ from call to call.
            work: returns what a step computes, in terms of ``tensors``, ``operands`` and views of the workspace.
            streams: the streams that run the lane's plans when there is no script.
        """

    def end(self, outputs: Sequence[Tensor], flags: _C.Flags | None) -> int:
        """Finish a call, and make sure that outputs after a failed wait are not mistaken for results. Return 0 if the
        call was only captured, else 1.

        Args:
            flags: those that the call has used, if any.
        """

    def give_up(self, op: str) -> None:
        """End every wait for a signal on this lane, on this rank and on the peers, now and later."""

    def why_gone(self, peer: int) -> str:
        """Return why no more signals will come from ``peer``, as far as is known; empty while some may still come."""


class Backend(Protocol):
    """One kind of device.

    Attributes:
        traits: see `Traits`.
    """

    traits: Traits

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Return the facts by which ranks find out whether they can reach each other's memory; see `topology`."""

    def offer(self) -> AbstractContextManager[Any]:
        """Return a context in which this rank offers memory for a trial, and how peers find it; None if they need no
        trial.
        """

    def take(self, offer: Any) -> str:
        """Return why this process cannot reach what a peer offers. Empty if it can."""

    def described(self, device: torch.device, use: bool = True) -> Device:
        """Return the `Device` that decides which costs apply. Its name is empty if this machine has no such device.

        Args:
            use: whether this process may start to use the device to find out, which allocates memory on it. Otherwise
                the usual value is returned for anything that can only be found out by using the device.
        """

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all work enqueued so far."""

    def mark(self, device: torch.device) -> Any:
        """Return an event after the work enqueued so far on the current stream of the device. Return None if there is
        no such event, because the stream is being captured or the device has no events: then only `synchronize` waits
        for that work.
        """

    def workspace(self, group: dist.ProcessGroup, device: torch.device, lane: int, tag: str) -> Workspace:
        """Return the workspace of a new lane. It has no memory yet."""

    def streams(self, device: torch.device, abandon: Callable[[], object]) -> Streams:
        """Return the streams that run the plans of a lane. ``abandon`` ends the waits of a run that has failed."""

    def stream_beside(self, device: torch.device) -> Any:
        """Return a new stream, whose work goes ahead of the work of other streams. None if all work is done when the
        call that starts it returns.
        """

    def stream_ahead(self, device: torch.device) -> Any:
        """Return the stream of the device on which nothing ever waits, for work that ends the waits of other streams.
        None if the device has no streams.
        """

    def resolve(self, device: torch.device) -> torch.device:
        """Return ``device`` with its index. Raises ValueError if there is no such device."""

    def rendezvous_number(self, tensor: Tensor, group: GroupState) -> int:
        """Return the number of the group's rendezvous in which the tensor's memory was shared; 0 if peers cannot read
        it.
        """

    def new_output(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised contiguous tensor with the dtype and device of ``like``."""

    def copy(self, target: Tensor, source: Tensor) -> object:
        """Do ``target.copy_(source)``."""

    def keep_for_current_stream(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor`` from being reused before the work enqueued so far on the current stream is
        done.
        """

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None) -> object:
        """Do ``torch.mm(a, b, out=out)``, or ``out.addmm_(a, b)`` if ``add``. A bias, a number for each column, is
        added to the product before it is rounded, as in ``torch.addmm(bias, a, b, out=out)``. If ``out`` has another
        dtype than the factors, or if a product with a bias is added to it, the product is rounded to the dtype of the
        factors first.
        """

    def multiply_shards(
        self,
        shards: Sequence[Tensor],
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        products: Sequence[Tensor],
    ) -> None:
        """Compute ``product = torch.cat(shards) @ B + bias`` for each weight, bias and product, reading the shards in
        place.
        """

    def calls_torch(self, dtype: torch.dtype) -> bool:
        """True if every matmul of this dtype is torch's own."""

    def sum(self, partials: list[Tensor], average: bool, out: Tensor, copy: Tensor | None = None) -> None:
        """Write the sum (or mean) of ``partials`` to ``out`` and, if given, to ``copy``. The partials are added in
        their order, in float32 or wider.
        """

    def machine(self, device: torch.device) -> tuple[int, int]:
        """Return what Triton kernels run on: the compute capability of a GPU times 10, and its number of
        multiprocessors. For Triton's interpreter these are 0 and 2, so that a persistent kernel has one program.
        """

    def multiplies_float8(self, device: torch.device) -> bool:
        """True if torch can multiply float8 matrices with scales on this device."""

    def load_matmuls(self, device: torch.device) -> None:
        """Load what matmuls need and a capture cannot load, for this thread and for that of backward passes."""

    def raise_failures(self) -> None:
        """Raise if a wait of an earlier call has failed, as far as the host knows so far."""
