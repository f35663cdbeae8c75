"""Peak memory of all-gather-matmul: what a call needs beyond its inputs, its output and the standing workspace.

**growth** of a call is the peak during calls, minus the level before them, minus the size of the output. "Before" is
after some warm-up calls, so the workspace, which is allocated once and kept, is not in it; its size is given beside it
as **standing**.

On CPU the peak is the kernel's own high-water mark of resident memory, reset before the calls, so nothing is missed
between samples. Memory that was freed before must go back to the system for this to be right: the ranks run with a
small malloc threshold, and let go what is kept of large outputs. Pages of a peer's buffer count once a rank has read
them, hence in the warm-up. On CUDA it is the high-water mark of torch's caching allocator; the standing workspace is
what the device has less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

import symm_overlap
from bench.harness.case import Case, inputs
from bench.harness.launch import Rank, launch
from symm_overlap import _C

_CALLS = 5
# Below this the pages the kernel counts lazily on each core, and Python's own, are a visible share of the figure.
MIN_GATHERED_BYTES = 4 << 20
# glibc raises its thresholds when large blocks are freed, and would then keep what a call had allocated.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure(case: Case, device: str, threads: int, *, return_A: bool) -> dict[str, object]:
    """Growth and standing memory of one shape in bytes, the largest over ranks, measured in new processes."""
    with variables(MALLOC):
        found = launch(_measure_rank, case.world, device, case, return_A, threads=threads)
    largest = {name: max(one[name] for one in found) for name in ("growth_bytes", "standing_bytes")}
    return {**case.key(), "return_A": return_A, "gathered_bytes": case.gathered_bytes, **largest}


def _measure_rank(rank: Rank, case: Case, return_A: bool) -> dict[str, int]:
    a, b = inputs(case, rank.rank, "normal", rank.device)
    meter = meter_of(rank.device)

    def call() -> int:
        _, outputs = symm_overlap.all_gather_matmul(a, [b], 0, rank.group_name, return_A=return_A)
        return sum(output.numel() * output.element_size() for output in outputs)

    a @ b  # the matmul library's own buffers belong to no op; nor does what a first call of any size loads and imports
    symm_overlap.all_gather_matmul(a[:1, :8].contiguous(), [b[:8, :8].contiguous()], 0, rank.group_name)
    before = meter.standing()
    for _ in range(_CALLS):
        output_bytes = call()
    rank.start.wait()
    standing = meter.standing() - before
    growth = meter.growth(lambda: [call() for _ in range(_CALLS)]) - output_bytes
    return {"growth_bytes": growth, "standing_bytes": standing}


def meter_of(device: torch.device) -> Meter:
    """What measures the memory of a device."""
    return _CudaMeter() if device.type == "cuda" else _CpuMeter()


def why_not(device: str) -> str:
    """Empty where memory can be measured, else the reason."""
    if device == "cuda":
        return ""
    try:
        _CpuMeter().growth(lambda: None)
    except OSError as error:
        return f"the kernel's high-water mark of resident memory cannot be reset here: {error}"
    return ""


class Meter(Protocol):
    """Measures memory, in bytes."""

    def standing(self) -> int:
        """What is taken now."""

    def growth(self, work: Callable[[], object]) -> int:
        """How far above its level at the start memory rose while ``work`` ran."""


class _CpuMeter:
    """Resident memory of this process, in bytes."""

    def standing(self) -> int:
        """The process's share of memory: a page that several ranks map counts for each in part."""
        _C.release_kept_outputs()
        return _kilobytes(Path("/proc/self/smaps_rollup"), "Pss:")

    def growth(self, work: Callable[[], object]) -> int:
        """How far above its level at the start resident memory rose while `work` ran."""
        _C.release_kept_outputs()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present level
        before = _kilobytes(Path("/proc/self/status"), "VmHWM:")
        work()
        return _kilobytes(Path("/proc/self/status"), "VmHWM:") - before


class _CudaMeter:
    """Memory of the current CUDA device, in bytes."""

    def standing(self) -> int:
        """What lives in torch's caching allocator and what is taken outside it, as symmetric memory is."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()

    def growth(self, work: Callable[[], object]) -> int:
        """How far above its level at the start allocated memory rose while `work` ran."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def _kilobytes(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no line {field}")


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
