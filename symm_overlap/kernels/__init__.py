"""Triton kernels, one file for each op, and the pure functions that choose their configuration.

Importing this package does not import Triton. `configuration` and `tile_order` are plain Python, and `load` imports a
module with kernels when one of them is to be launched.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from .configuration import INTERPRETER, SHARED_BYTES


def has_kernels(architecture: int) -> bool:
    """True if there are kernels for this GPU architecture, and Triton is installed to compile them."""
    return architecture in SHARED_BYTES and importlib.util.find_spec("triton") is not None


def load(name: str, architecture: int) -> ModuleType:
    """Import a module of kernels for this architecture.

    On a CPU, kernels run in Triton's interpreter, which has to be switched on before they are imported.

    Raises:
        RuntimeError: Triton is not installed, or the kernels were imported for a GPU and this is a CPU, or vice versa.
    """
    try:
        module = importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError("the path 'fused' needs Triton: pip install triton") from None
    interpreted: bool = module.INTERPRETED
    if interpreted != (architecture == INTERPRETER):
        raise RuntimeError(
            "these kernels were imported for Triton's interpreter, and cannot run on a GPU: unset TRITON_INTERPRET "
            "and start the program again"
            if interpreted
            else "on a CPU the path 'fused' runs in Triton's interpreter: set TRITON_INTERPRET=1 before its first call"
        )
    return module
