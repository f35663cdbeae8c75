"""A capture of a CUDA graph, as lanes on a CPU would see it, for tests of what the host does in a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from symm_overlap.runtime import Lane, NotCapturedError, NotPreparedError
from symm_overlap.runtime.cpu.workspace import CpuWorkspace


@contextmanager
def captures_on_cpu(prepared: bool = True) -> Iterator[None]:
    """Inside, lanes on CPU say that a graph is being captured. Their calls run nothing, or are rejected because they
    are not prepared or cannot be captured.
    """

    def run(lane: Lane, *arguments: object, **options: object) -> bool:
        if not prepared:
            raise NotPreparedError("not prepared")
        return False

    def require_capturable(workspace: CpuWorkspace, what: str) -> None:
        if not prepared:
            raise NotCapturedError(f"{what} cannot be captured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuWorkspace, "capturing", lambda workspace: True)
        patch.setattr(Lane, "run", run)
        patch.setattr(CpuWorkspace, "require_capturable", require_capturable)
        yield
