"""Load kernels for Triton's interpreter. Only processes of ranks do this: pytest's own process imports the kernels for
the compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import INTERPRETER
from symm_overlap.kernels.flags import Caller

CALLER = Caller("all_gather_matmul", "of ranks", 0, 0, 2, 1)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels imported inside this context run in the interpreter until the process ends."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def kernels(name: str) -> ModuleType:
    """Return a module of kernels, loaded for the interpreter."""
    with interpreting():
        module = load(name, INTERPRETER)
    replace_language_once()
    return module


def replace_language_once() -> None:
    """Let the interpreter replace Triton's language once for a kernel, instead of again for each call of a function in
    it. That took a quarter of the time of a kernel.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if patch.__module__ == __name__:
        return

    def patch_once(function: Any) -> Any:
        original = interpreter.tl.core.is_builtin(interpreter.tl.load)
        return patch(function) if original else None

    interpreter._patch_lang = patch_once


@contextmanager
def without_overflow_checks() -> Iterator[None]:
    """Inside, the interpreter does not compute every sum and product of integers again in 64 bits, which takes a third
    of its time. For tests of the exchange around a kernel. The tests of the kernels themselves keep these checks.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    with mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)):
        yield


def require_rounded(found: Tensor, exact: Tensor, k: int) -> None:
    """Check that every element is the exact one, rounded once to its dtype, within the error of a sum of ``k`` products
    in the accumulator.
    """
    eps = torch.finfo(found.dtype).eps / 2
    accumulated = max(k, 1) * torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
    # There is no absolute tolerance: sums of products of numbers in [0, 1) are not near zero by cancellation.
    torch.testing.assert_close(found.double(), exact, rtol=eps + accumulated, atol=0)
