"""The peak memory of a step counts all memory of the trace that is in use during the step, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from symm_overlap._torch import symm_mem
from symm_overlap.demo.memory import MEASURED, peak_in
from symm_overlap.demo.timeline import trace_to

KIB = 1 << 10


def held(step: Callable[[], object], path: Path) -> int:
    """Return the peak of ``step``. Before it, 64 KiB are allocated and kept, and 16 KiB are allocated and freed."""
    with trace_to(str(path), memory=True):
        kept, freed = (torch.empty(size * KIB, dtype=torch.uint8) for size in (64, 16))
        del freed
        with record_function(MEASURED):
            step()
        after = torch.empty(1 << 20, dtype=torch.uint8)
        del kept, after
    return peak_in(json.loads(path.read_text())["traceEvents"])


def resized() -> None:
    storage = torch.empty(8 * KIB, dtype=torch.uint8).untyped_storage()
    storage.resize_(0)
    storage.resize_(4 * KIB)


def one_after_another() -> None:
    for size in (8, 32, 16):
        torch.empty(size * KIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("step", "peak"),
    [
        (lambda: None, 64),
        (one_after_another, 64 + 32),
        (resized, 64 + 8),
        (lambda: torch.empty(8 * KIB, dtype=torch.uint8).clone().clone(), 64 + 16),  # two are alive at a time
        (lambda: symm_mem.empty(32 * KIB, dtype=torch.uint8, device="cpu"), 64 + 32),
    ],
    ids=["nothing", "one after another", "resized storage", "temporaries", "symmetric memory"],
)
def test_the_peak_is_the_most_that_is_in_use_at_once(step: Callable[[], object], peak: int, tmp_path: Path) -> None:
    before = torch.empty(1 << 20)  # allocated before the trace, so it does not count
    assert held(step, tmp_path / "trace.json") == peak * KIB
    assert before.numel()
