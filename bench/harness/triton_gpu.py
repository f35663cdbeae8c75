"""A fake GPU for Triton: kernels are compiled for it and loaded, and launches are recorded and not carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from symm_overlap import _C
from symm_overlap.kernels import load
from symm_overlap.kernels.flags import ABANDONED, EPOCH, LINE
from symm_overlap.runtime.cpu.backend import CpuBackend

KERNELS = {
    "all_gather_matmul": ["all_gather_matmul"],
    "matmul_reduce_scatter": ["matmul_reduce_scatter"],
}


class NativeFlags(_C.NoFlags):
    """The flags of csrc/cuda/flags.h in memory of the host, where every operation is done at once."""

    def __init__(self, status: Tensor, record: Tensor, in_memory: bool) -> None:
        super().__init__()
        self.status, self.record, self.in_memory = status, record, in_memory
        self.words = status[:0]
        self._caller = -1

    def use(self, words: Tensor) -> None:
        self.words = words

    def begin(self, caller: int) -> None:
        self._caller = caller

    def up(self, chunk: int) -> None:
        self.words[chunk * LINE] = self.status[EPOCH]

    def wait(self, chunk: int) -> None:
        """Do nothing: whatever could set the flag has already run."""

    def end(self) -> None:
        """Do what the last launch of a call does for its flags."""
        if self.status[0] != 0 and self.record[0] == 0:
            self.record[:-1] = self.status[: len(self.record) - 1]
            self.record[-1] = self._caller
        self.status[EPOCH] += 1

    def give_up(self) -> None:
        self.status[0] = ABANDONED


class Driver:
    """The parts of a driver that Triton uses.

    Attributes:
        loaded, launched: the names of kernels, in order.
        stream: what torch returns as the current stream.
    """

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.utils, self.stream = self, mock.Mock()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert binary
        self.loaded.append(name)
        return 1, 2, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        name = metadata.name
        return lambda *arguments: self.launched.append(name)


class _Compiled:
    """Replaces a compiled kernel if nothing is really compiled."""

    function, packed_metadata = 2, ()
    module: int | None

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver, self._name, self.module = driver, name, None

    def _init_handles(self) -> None:
        if self.module is None:
            self.module = 1
            self._driver.loaded.append(self._name)

    def launch_metadata(self, *arguments: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        self._init_handles()
        self._driver.launched.append(self._name)


class SilentFlags(_C.NoFlags):
    """Flags on which nothing is done, for a stand-in that records what is raised and awaited."""

    def __init__(self, status: Tensor, record: Tensor, in_memory: bool) -> None:
        super().__init__()

    def use(self, words: Tensor) -> None:
        """Ignore the words."""

    def begin(self, caller: int) -> None:
        """Do nothing, as a call on a GPU launches nothing here."""


@contextmanager
def gpu(architecture: int, *, compiling: bool = False, flags: type[_C.Flags] = NativeFlags) -> Iterator[Driver]:
    """Inside this context, let Triton find a GPU of this architecture.

    Args:
        compiling: whether kernels are really compiled, which takes seconds.
        flags: replaces the class of the flags of a lane.
    """
    driver = Driver(architecture)
    with ExitStack() as stack:
        if not compiling:
            compiled = lambda source, **_: _Compiled(driver, source.fn.__name__)  # noqa: E731
            stack.enter_context(mock.patch("triton.compiler.compile", compiled))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(mock.patch("triton.compiler.compiler.max_shared_mem", return_value=227 << 10))
        # The parts of torch that flags use on a GPU.
        zeros = torch.zeros
        unpinned = lambda *size, pin_memory=False, **options: zeros(*size, **options)  # noqa: E731
        stack.enter_context(mock.patch.object(torch, "zeros", unpinned))
        stack.enter_context(mock.patch.object(torch.cuda, "Stream"))
        stack.enter_context(mock.patch.object(torch.cuda, "stream"))
        stack.enter_context(mock.patch.object(_C, "CudaFlags", flags, create=True))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=driver.stream))
        for kernel in kernels(architecture):
            stack.enter_context(
                mock.patch.object(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
            )
        yield driver


@contextmanager
def beside_a_kernel(flags: type[_C.Flags] = NativeFlags) -> Iterator[Driver]:
    """Let fused calls on the stand-in (`standing_in`) find a GPU of architecture 90, for which Triton compiles."""
    machine = mock.patch.object(CpuBackend, "machine", return_value=(90, 132))
    with gpu(90, compiling=True, flags=flags) as driver, machine:
        yield driver


def kernels(architecture: int) -> list[Any]:
    """Return every kernel of the fused path."""
    modules: dict[str, ModuleType] = {name: load(name, architecture) for name in KERNELS}
    return [getattr(modules[module], f"{name}_kernel") for module, names in KERNELS.items() for name in names]


def keys(architecture: int) -> dict[str, set[str]]:
    """Return, for each kernel, the keys of its variants that have been compiled so far."""
    return {kernel.__name__: set(kernel.device_caches[0][0]) for kernel in kernels(architecture)}
