"""The back end for CPUs. It decides what makes a CPU fast: which library multiplies, which copies bypass the caches,
and which output memory is reused.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...plan import Streams, ThreadStreams
from ..costs import Device
from .sliced_matmul import multiply_shards
from .traits import TRAITS
from .workspace import CpuWorkspace

if TYPE_CHECKING:
    from ..group import GroupState


class CpuBackend:
    """See `symm_overlap.runtime.backend.Backend`."""

    traits = TRAITS
    _native = True  # whether scripts call the functions of csrc/cpu themselves
    multiply_shards = staticmethod(multiply_shards)

    copy = staticmethod(_C.copy)

    multiply = staticmethod(_C.multiply)
    """float32 matmuls use oneDNN on machines where MKL, which torch calls, would leave half of the machine unused
    (csrc/cpu/matmul.cpp). As for torch's own ops, ``torch.backends.mkldnn.enabled = False`` turns that off.
    """

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Return the facts of a CPU rank. All CPU ranks of a host share its memory.

        Raises:
            RuntimeError: the folder for shared memory is missing or not writable.
        """
        folder = _C.shm_dir()
        if not os.access(folder, os.W_OK | os.X_OK):
            why = "cannot be written" if os.path.isdir(folder) else "is missing"
            raise RuntimeError(
                f"the folder for shared memory, {folder}, {why}: "
                "set SYMM_OVERLAP_SHM_DIR to a writable tmpfs, or force_path('c10d') to do without shared memory"
            )
        return {"memory": "shared", "reaches": ["shared"], "shares": True}

    @contextmanager
    def offer(self) -> Iterator[list[int]]:
        """See `Backend.offer`. Peers open shared memory in the same way (csrc/cpu/shared_object.cpp).

        Raises:
            RuntimeError: this process cannot create shared memory.
        """
        folder = _C.shm_dir()
        try:
            file = os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeError(
                f"cannot create shared memory in {folder}: {error.strerror}. Set SYMM_OVERLAP_SHM_DIR to a writable "
                "tmpfs, or force_path('c10d') to do without shared memory"
            ) from None
        try:
            found = os.fstat(file)
            yield [os.getpid(), file, found.st_dev, found.st_ino]
        finally:
            os.close(file)

    def take(self, offer: list[int]) -> str:
        """See `Backend.take`.

        Raises:
            OSError: this process has too many open files.
        """
        pid, number, device, inode = offer
        path = f"/proc/{pid}/fd/{number}"
        try:
            found = os.stat(path)  # before it is opened: it may be something else, of another process
            if (found.st_dev, found.st_ino) != (device, inode):
                return f"{path} is another file here"
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return f"{path}: {error.strerror}"
        return ""

    def described(self, device: torch.device, use: bool = True) -> Device:
        """Return the model name of the processor."""
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return Device(names[0] if names else platform.machine())

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: on CPU, all work is done when the call returns."""

    def mark(self, device: torch.device) -> None:
        """Return None: a CPU has no events."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Note whether the class replaces methods, which scripts would bypass."""
        super().__init_subclass__(**options)
        cls._native = cls._native and vars(cls).keys().isdisjoint({"multiply", "copy", "sum"})

    def workspace(self, group: dist.ProcessGroup, device: torch.device, lane: int, tag: str) -> CpuWorkspace:
        """See `Backend.workspace`."""
        return CpuWorkspace(group, tag, self._native)

    def streams(self, device: torch.device, abandon: Callable[[], object]) -> Streams:
        """Return the calling thread as the first stream, and a thread for each further stream."""
        # no_grad is not enough: outputs that a caller allocates in inference mode may be written only in that mode.
        return ThreadStreams(torch.inference_mode, abandon)

    def stream_beside(self, device: torch.device) -> None:
        """Return None: on CPU, all work is done when the call returns."""

    def stream_ahead(self, device: torch.device) -> None:
        """Return None: a CPU has no streams."""

    def resolve(self, device: torch.device) -> torch.device:
        """See `Backend.resolve`."""
        return torch.device("cpu")

    def rendezvous_number(self, tensor: Tensor, group: GroupState) -> int:
        """See `Backend.rendezvous_number`. This also works for a rendezvous made by torch's own function."""
        return _C.rendezvous_number(tensor, group.name)

    def new_output(self, like: Tensor, *shape: int) -> Tensor:
        """See `Backend.new_output`. A large output gets large pages, or reuses the memory of a freed output of its size
        if there is one: the page faults of a fresh tensor of 32 MiB take several times as long as copying it. At most
        256 MiB of freed memory are kept for reuse, and the operating system may reclaim them earlier.
        """
        return _C.new_output(like, shape)

    def keep_for_current_stream(self, tensor: Tensor) -> None:
        """Do nothing: on CPU, all work is done when the call returns."""

    def calls_torch(self, dtype: torch.dtype) -> bool:
        """See `Backend.calls_torch`."""
        return dtype != torch.float32 or not _C.onednn_is_quicker()

    def sum(self, partials: Sequence[Tensor], average: bool, out: Tensor, copy: Tensor | None = None) -> None:
        """See `Backend.sum`."""
        if out.numel() == 0:
            return
        _C.reduce(partials, out, average)
        if copy is not None:
            copy.copy_(out)

    def machine(self, device: torch.device) -> tuple[int, int]:
        """See `Backend.machine`."""
        return 0, 2

    def multiplies_float8(self, device: torch.device) -> bool:
        """See `Backend.multiplies_float8`."""
        return True

    def load_matmuls(self, device: torch.device) -> None:
        """Do nothing: on CPU nothing is captured."""

    def raise_failures(self) -> None:
        """Do nothing: on CPU a failed wait raises in the call itself."""
