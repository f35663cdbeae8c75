"""A capture of a CUDA graph, as lanes on a CPU would see it, for tests of what the host does in a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from symm_overlap.runtime import Lane, NotPreparedError
from symm_overlap.runtime.cpu.workspace import CpuWorkspace


@contextmanager
def captures_on_cpu(prepared: bool = True) -> Iterator[None]:
    """Inside, lanes on CPU say that a graph is being captured, and their calls run nothing, or are not prepared."""

    def run(lane: Lane, *arguments: object, **options: object) -> bool:
        if not prepared:
            raise NotPreparedError("not prepared")
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuWorkspace, "capturing", lambda workspace: True)
        patch.setattr(Lane, "run", run)
        yield
