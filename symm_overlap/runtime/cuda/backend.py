"""The back end for NVIDIA GPUs: torch's own symmetric memory, CUDA streams, and the kernels of csrc/cuda."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...plan import Streams
from ..costs import Device
from .memory_operations import stream_waits
from .signals import check_lanes
from .streams import CudaStreams, stream_ahead
from .traits import TRAITS
from .workspace import CudaWorkspace

if TYPE_CHECKING:
    from ..group import GroupState


class _LoadsMatmuls(torch.autograd.Function):
    """Return the input. Forward and backward create a handle of cuBLAS in their threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda.current_blas_handle()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda.current_blas_handle()
        return grad


class CudaBackend:
    """See `symm_overlap.runtime.backend.Backend`."""

    traits = TRAITS
    multiply = staticmethod(_C.multiply_by_torch)

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Return the GPU of this rank, and the GPUs that it can reach."""
        # GPUs are named by their UUIDs, not by index: each process that sees only one GPU calls it 0.
        here = device.index
        gpus = {index: str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())}
        reaches = [
            gpu for index, gpu in gpus.items() if index == here or torch.cuda.can_device_access_peer(here, index)
        ]
        shares = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # otherwise torch's rendezvous fails
        return {"memory": gpus[here], "reaches": reaches, "shares": shares}

    def offer(self) -> AbstractContextManager[None]:
        """See `Backend.offer`: the driver has said which GPUs can be reached."""
        return nullcontext()

    def take(self, offer: Any) -> str:
        """See `Backend.take`."""
        return ""

    def described(self, device: torch.device, use: bool = True) -> Device:
        """See `Backend.described`."""
        name = torch.cuda.get_device_properties(device).name if torch.cuda.device_count() else ""
        # With TRITON_INTERPRET, kernels would run on the host.
        compiles = os.environ.get("TRITON_INTERPRET", "0") in ("", "0") and find_spec("triton") is not None
        return Device(name, stream_waits(device, use), compiles)

    def synchronize(self, device: torch.device) -> None:
        """See `Backend.synchronize`."""
        torch.cuda.synchronize(device)

    def mark(self, device: torch.device) -> torch.cuda.Event | None:
        """See `Backend.mark`. An event recorded in a capture belongs to the graph, and nothing else can wait for it."""
        return None if _C.capturing(device.index) else torch.cuda.current_stream(device).record_event()

    def workspace(self, group: dist.ProcessGroup, device: torch.device, lane: int, tag: str) -> CudaWorkspace:
        """See `Backend.workspace`."""
        return CudaWorkspace(group, device, lane, tag)

    def streams(self, device: torch.device, abandon: Callable[[], object]) -> Streams:
        """Return the CUDA streams of a lane. ``abandon`` is not needed: waits by kernels have deadlines, and the host
        ends waits by memory operations of streams (csrc/common/host_lane.h).
        """
        return CudaStreams(device)

    def stream_beside(self, device: torch.device) -> torch.cuda.Stream:
        """See `Backend.stream_beside`. It is none of torch's streams, which several owners share."""
        return torch.cuda.ExternalStream(_C.new_cuda_stream(device.index, True), device)

    def stream_ahead(self, device: torch.device) -> torch.cuda.Stream:
        """See `Backend.stream_ahead`."""
        return stream_ahead(device)

    def resolve(self, device: torch.device) -> torch.device:
        """See `Backend.resolve`."""
        if not torch.cuda.is_available():
            raise ValueError(f"device is {str(device)!r}, but torch sees no GPU: allowed is 'cpu'")
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def rendezvous_number(self, tensor: Tensor, group: GroupState) -> int:
        """See `Backend.rendezvous_number`. Only memory of `symm_overlap.empty` has a number: torch cannot be asked
        without a collective call.
        """
        return group.symmetric.get(tensor.untyped_storage(), 0) if group.symmetric else 0

    def new_output(self, like: Tensor, *shape: int) -> Tensor:
        """See `Backend.new_output`."""
        return like.new_empty(shape)

    def copy(self, target: Tensor, source: Tensor) -> object:
        """See `Backend.copy`."""
        return target.copy_(source)

    def multiply_shards(
        self,
        shards: Sequence[Tensor],
        Bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        products: Sequence[Tensor],
    ) -> None:
        """Never called: on CUDA matmuls do not read the peers' memory (`Traits.in_place` is False)."""
        raise NotImplementedError("on CUDA shards are gathered before they are multiplied")

    def keep_for_current_stream(self, tensor: Tensor) -> None:
        """See `Backend.keep_for_current_stream`."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def calls_torch(self, dtype: torch.dtype) -> bool:
        """See `Backend.calls_torch`."""
        return True

    def sum(self, partials: Sequence[Tensor], average: bool, out: Tensor, copy: Tensor | None = None) -> None:
        """See `Backend.sum`."""
        if out.numel():
            torch.ops.symm_overlap.reduce_partials(partials, average, out, copy)

    def machine(self, device: torch.device) -> tuple[int, int]:
        """See `Backend.machine`."""
        properties = torch.cuda.get_device_properties(device)
        return 10 * properties.major, properties.multi_processor_count

    def multiplies_float8(self, device: torch.device) -> bool:
        """See `Backend.multiplies_float8`. True from the Ada and Hopper generations on."""
        return torch.cuda.get_device_capability(device) >= (8, 9)

    def load_matmuls(self, device: torch.device) -> None:
        """See `Backend.load_matmuls`. cuBLAS allocates memory when a thread first uses it."""
        with torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
            _LoadsMatmuls.apply(torch.zeros((), device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]

    def raise_failures(self) -> None:
        """See `check_lanes`."""
        if torch.cuda.is_available():
            check_lanes()
