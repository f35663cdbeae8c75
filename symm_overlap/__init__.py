"""Overlap kernels for collective matmul on symmetric memory. See README.md."""

from importlib import import_module
from typing import Any

from . import _extension as _extension
from ._version import VERSION
from .blocks import force_path, lane, sum_order, timeout
from .collective import (
    Choice,
    Tuned,
    all_gather,
    all_gather_matmul,
    all_gather_scaled_matmul,
    all_gather_weight_matmul,
    all_reduce,
    autotune,
    empty,
    explain,
    install_as_symm_mem,
    matmul_all_reduce,
    matmul_reduce_scatter,
    prepare,
    raise_failures,
    reduce_scatter,
    scaled_matmul_reduce_scatter,
)

__version__ = VERSION


def __getattr__(name: str) -> Any:
    # Imported on first use: torch's compiler and DTensor take seconds to import, and few programs have pipelines.
    if name in ("fsdp", "inductor", "nn", "pipeline", "profile"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "fsdp", "inductor", "nn", "pipeline", "profile"]


__all__ = [
    "Choice",
    "Tuned",
    "__version__",
    "all_gather",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "all_gather_weight_matmul",
    "all_reduce",
    "autotune",
    "empty",
    "explain",
    "force_path",
    "install_as_symm_mem",
    "lane",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "prepare",
    "raise_failures",
    "reduce_scatter",
    "scaled_matmul_reduce_scatter",
    "sum_order",
    "timeout",
]
