"""Every private Triton API this project uses, in one place. Checked on Triton 3.6.0 and 3.9.0.

What a kernel is compiled for, the key under which Triton keeps it, is made of the types of its arguments, of which
numbers are 1 or divisible by 16, of which addresses are, and of the options. Nothing else is read from tensors here, so
that they may be on the device "meta". In Triton's interpreter both functions do nothing.
"""

from __future__ import annotations

from typing import Any


class NotLoadedError(RuntimeError):
    """A kernel is not on the current device yet."""


def load_ahead(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Compile a kernel as a launch with the same arguments and options would, and load it onto the current device."""
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    if compiled is not None:
        compiled._init_handles()


def require_loaded(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Raises NotLoadedError where a launch with the same arguments and options would have to load the kernel. Nothing
    is asked of the device.
    """
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    if compiled is not None and compiled.module is None:
        raise NotLoadedError(f"{kernel} is not loaded")
