"""Every private Triton API this project uses, in one place. Checked on Triton 3.6.0 and 3.9.0."""

from __future__ import annotations

from typing import Any


def compile_ahead(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Compile a kernel as a launch with the same arguments and options would, and load it onto the current device.

    A launch that follows finds it in the kernel's cache, whose key is made of the types of the arguments, of which
    numbers are 1 or divisible by 16, of which addresses are, and of the options. Nothing is read from tensors but their
    dtype and address, so that they may be on the device "meta". In Triton's interpreter this does nothing.
    """
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    if compiled is not None:
        compiled._init_handles()
