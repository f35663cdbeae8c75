"""Loading kernels before their launch, with private APIs of Triton. Checked on Triton 3.6.0 to 3.9.0.

Triton caches a compiled kernel under a key. The key consists of the types of its arguments, which numbers are 1 or
divisible by 16, which addresses are divisible by 16, and the options. Nothing else is read from tensors here, so they
may be on the device "meta". In Triton's interpreter both functions do nothing.
"""

from __future__ import annotations

from typing import Any


class NotLoadedError(RuntimeError):
    """A kernel is not loaded on the current device yet."""


def load_ahead(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Compile a kernel as a launch with the same arguments and options would, and load it on the current device."""
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    if compiled is not None:
        compiled._init_handles()


def require_loaded(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Raise NotLoadedError if a launch with the same arguments and options would have to load the kernel. The device is
    not accessed.
    """
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    if compiled is not None and compiled.module is None:
        raise NotLoadedError(f"{kernel} is not loaded")
