"""Kernels in Triton's interpreter, in a rank's process: in pytest's own they are imported to be compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import INTERPRETER
from symm_overlap.kernels.flags import Caller

CALLER = Caller("all_gather_matmul", "of ranks", 0, 0, 2, 1)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are imported here are for the interpreter, as long as the process lives."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def kernels(name: str) -> ModuleType:
    """A module of kernels."""
    with interpreting():
        return load(name, INTERPRETER)


def require_rounded(found: Tensor, exact: Tensor, k: int) -> None:
    """Every element is the exact one, rounded once to its dtype, as far as a sum of ``k`` products in the accumulator
    can tell.
    """
    eps = torch.finfo(found.dtype).eps / 2
    accumulated = max(k, 1) * torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
    # An element of `exact` may be near zero by cancellation; sums of products of [0, 1) numbers cannot.
    torch.testing.assert_close(found.double(), exact, rtol=eps + accumulated, atol=0)
