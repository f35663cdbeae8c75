"""The back end of each kind of device."""

from __future__ import annotations

from functools import cache

from .backend import Backend, Traits
from .cpu.backend import CpuBackend
from .cpu.traits import TRAITS as CPU
from .cuda.traits import TRAITS as CUDA

TRAITS: dict[str, Traits] = {traits.device: traits for traits in (CPU, CUDA)}
"""The traits of every kind of device, including kinds that this machine does not have."""


@cache
def backend_of(kind: str) -> Backend:
    """Return the back end of a kind of device, as in ``torch.device.type``.

    Raises:
        ValueError: there is no back end for this kind.
    """
    if kind not in TRAITS:
        raise ValueError(f"no back end for {kind!r}: there are {', '.join(TRAITS)}")
    if kind == CUDA.device:
        from .cuda.backend import CudaBackend

        return CudaBackend()
    return CpuBackend()
