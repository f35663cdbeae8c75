"""A capture of a CUDA graph, as lanes on a CPU would see it, for tests of what may not be captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from symm_overlap.runtime.cpu.workspace import CpuWorkspace


@contextmanager
def captures_on_cpu() -> Iterator[None]:
    """Inside, lanes on CPU say that a graph is being captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuWorkspace, "capturing", lambda workspace: True)
        yield
