"""Whether streams of a GPU signal and wait by memory operations, which hold no multiprocessor: tried once a process."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch

from ... import _C
from ..._torch import has_context


def stream_waits(device: torch.device, use: bool = True, shared: bool = True) -> bool:
    """Whether streams of a device can signal and wait by memory operations, and the user has not said otherwise.

    Where those of one rank do not, none of its group do.

    Args:
        use: see `Backend.described`. The operations are tried, for which there has to be a CUDA context.
        shared: whether in memory that ranks' processes share, as all lanes but those of benchmarks do.
    """
    wanted = os.environ.get("SYMM_OVERLAP_STREAM_WAITS", "1") not in ("", "0")
    # The package may be compiled for CPUs alone.
    if not wanted or not _C.with_cuda or not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    if not use and not has_context(index):
        return True
    return _has_memory_operations(index) and (not shared or _may_pin(index))


@cache
def _has_memory_operations(index: int) -> bool:
    found: bool = _C.has_memory_operations(index)
    return found


@cache
def _may_pin(index: int) -> bool:
    """Whether this process may pin shared memory for a GPU. It warns where not, as kernels that wait hold its SMs.

    Lanes pin theirs, and where one of them may not, kernels wait. It is tried ahead, so that choices go by it.
    """
    refused: str = _C.pinning_refused(index)
    if refused:
        reason = refused.splitlines()[0]
        warnings.warn(f"symm_overlap: kernels wait for signals on cuda:{index}: {reason}", stacklevel=2)
    return not refused
