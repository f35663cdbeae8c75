"""Blocks in which functions of torch.compile run uncompiled."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import torch


class _Uncompiled:
    """`uncompiled`. torch has one setting for all threads, so the first block sets it and the last one restores it.

    If each block restored what it found, two blocks that overlap could leave the setting behind for good.
    """

    def __init__(self) -> None:
        self.lock, self.blocks = Lock(), 0
        self.stance: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        with self.lock:
            # Without the compiler, which takes seconds to import, nothing is compiled.
            if self.blocks == 0 and "torch._dynamo" in sys.modules:
                self.stance = torch.compiler.set_stance("force_eager")
                self.stance.__enter__()
            self.blocks += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.blocks -= 1
            if self.blocks == 0:
                stance, self.stance = self.stance, nullcontext()
                stance.__exit__(None, None, None)


_uncompiled = _Uncompiled()


def uncompiled() -> AbstractContextManager[None]:
    """Return a context inside which functions of torch.compile run uncompiled, in all threads."""
    return _uncompiled
