"""How memory on a GPU goes away that kernels, memory operations or other ranks may still use.

Python may drop the last reference to it at any time, in any thread and on any stream. To free it then could end the
process (see ``may_free`` in csrc/cuda/stream.h), or give it to another stream while kernels still use it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .. import _C

# Not looked up when it is needed: the interpreter may have cleared its module by then. Builds without CUDA lack it.
_may_free: Callable[[int], bool] = getattr(_C, "may_free", lambda device: True)

_kept: list[object] = []

# The list outlives the interpreter. What it has when the process ends is never freed: that would end a process whose
# CUDA has failed, before the error can be seen.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def let_go(held: object, device: torch.device) -> None:
    """Wait for a GPU, so that what an owner of memory on it holds may be freed. The owner's ``__del__`` calls this.

    If one cannot wait for it, because a graph is being captured or CUDA has failed, keep it until `free_kept`. Other
    threads go on during the wait: the GPU may wait for what they are yet to launch.
    """
    if device.type == "cuda" and not _may_free(device.index):
        _kept.append(held)


def free_kept(device: torch.device) -> None:
    """Free what `let_go` has kept, unless that is not possible yet."""
    if _kept and _may_free(device.index):
        _kept.clear()
