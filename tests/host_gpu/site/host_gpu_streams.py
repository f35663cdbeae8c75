"""Calls of Python functions on the streams of the host GPU, and CPU tensors in the memory of CUDA tensors."""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

_cuda = ctypes.CDLL(os.environ["SYMM_OVERLAP_HOST_GPU"])
_cuda.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_cuda.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]

fail: Callable[[], object] = _cuda.host_gpu_fail

_functions: dict[int, Callable[[], object]] = {}
_captured: set[int] = set()
_keys = itertools.count(1)
_running: set[int] = set()  # the threads of streams that are running Python code


@ctypes.CFUNCTYPE(None, ctypes.c_size_t)
def _run(key: int) -> None:
    """Run a function on a stream. An error ends the process, so that no test takes unfinished memory for a result.

    The garbage collector is disabled meanwhile. If it freed GPU memory here, that would wait for all streams, and so
    the stream would wait for itself.
    """
    thread = threading.get_ident()
    _running.add(thread)
    gc.disable()
    try:
        (_functions[key] if key in _captured else _functions.pop(key))()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os.abort()
    finally:
        _running.discard(thread)
        if not _running:
            gc.enable()


atexit.register(_cuda.host_gpu_end)
_run_address = ctypes.cast(_run, ctypes.c_void_p).value


def _current_stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def enqueue(function: Callable[[], object]) -> None:
    """Let the current stream call a function. In a capture, the function is called in every replay."""
    key = next(_keys)
    _functions[key] = function
    if torch._C._cuda_isCurrentStreamCapturing():
        _captured.add(key)
    if error := _cuda.cudaLaunchHostFunc(_current_stream(), _run_address, key):
        raise RuntimeError(f"host GPU: the current stream does not accept work: error {error}")


def synchronize() -> None:
    """Wait for the current stream."""
    torch._C._cuda_getDevice()
    if error := _cuda.cudaStreamSynchronize(_current_stream()):
        _cuda.cudaGetLastError()
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing (host GPU: {error})")


class Place:
    """The memory layout of a CUDA tensor. Work on a stream keeps no reference to a tensor, as CUDA kernels do not."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_conj() or tensor.is_neg():
            raise NotImplementedError("host GPU: tensors that are conjugated or negated lazily")
        storage = tensor.untyped_storage()
        self._address, self._bytes = storage.data_ptr(), storage.nbytes()
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._strides = tuple(tensor.shape), tensor.stride()

    def tensor(self) -> torch.Tensor:
        """Return a CPU tensor in this memory."""
        if self._bytes == 0:
            return torch.empty_strided(self._shape, self._strides, dtype=self._dtype)
        memory = _bytes_at(self._address, self._bytes)
        made = torch.empty(0, dtype=self._dtype)
        return made.set_(memory.untyped_storage(), self._offset, self._shape, self._strides)


def _bytes_at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=torch.uint8)


# The first call of each of these functions sets up data in torch. If several threads did this at once, a thread that
# holds Python's lock could wait for a thread that needs it. Here there is only one thread.
_word = ctypes.c_int64()
torch.empty(0, dtype=torch.uint8).set_(_bytes_at(ctypes.addressof(_word), 8).untyped_storage(), 0, (8,), (1,))
torch.empty_strided((0,), (1,), dtype=torch.uint8)


def is_cuda(x: Any) -> bool:
    """True if ``x`` is a CUDA tensor."""
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"
