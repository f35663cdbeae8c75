"""Whether streams of a GPU can signal and wait by memory operations, which occupy no multiprocessor. Tried once a
process.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch

from ... import _C
from ..._torch import has_context


def stream_waits(device: torch.device, use: bool = True, shared: bool = True) -> bool:
    """Return whether streams of a device can signal and wait by memory operations, and the user has not disabled this
    (SYMM_OVERLAP_STREAM_WAITS=0).

    If the streams of one rank cannot, no rank of its group uses memory operations.

    Args:
        use: see `Backend.described`. The operations are tried, which needs a CUDA context. If False, and there is no
            context yet, the answer is True.
        shared: whether the operations must also work in memory shared by the ranks' processes. All lanes need this,
            except those of benchmarks.
    """
    wanted = os.environ.get("SYMM_OVERLAP_STREAM_WAITS", "1") not in ("", "0")
    # The package may be compiled for CPUs only.
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
    """Return whether this process may pin shared memory for a GPU. If not, warn, since kernels that wait occupy SMs.

    Lanes pin their shared memory. If one of them may not, kernels wait instead. This is tried ahead of time, so that
    the choice of a path can depend on it.
    """
    refused: str = _C.pinning_refused(index)
    if refused:
        reason = refused.splitlines()[0]
        warnings.warn(f"symm_overlap: kernels wait for signals on cuda:{index}: {reason}", stacklevel=2)
    return not refused
