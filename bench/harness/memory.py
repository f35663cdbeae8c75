"""Peak memory of all-gather-matmul: the memory a call needs beyond its inputs, its output and the standing workspace.

**growth** of a call is the peak during calls, minus the level before them, minus the size of the output. The level
before is measured after some warm-up calls. The growth therefore does not include the workspace, which is allocated
once and kept. The size of the workspace is reported separately as **standing**.

On CPU the peak is the kernel's own high-water mark of resident memory. It is reset before the calls, so no peak is
missed. For a correct result, memory that was freed before must be returned to the system. Therefore the ranks run with
a small malloc threshold and release the memory kept for large outputs. The pages of a peer's buffer count from the time
a rank reads them, which happens in the warm-up. On CUDA the peak is the high-water mark of torch's caching allocator,
and the standing workspace is the increase of the memory in use on the device.
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
# For smaller tensors, Python's own pages and the kernel's delayed page counts on each core would distort the figure.
MIN_GATHERED_BYTES = 4 << 20
# Without fixed thresholds, glibc raises them when large blocks are freed, and would then keep the memory of a call.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure(case: Case, device: str, threads: int, *, return_A: bool) -> dict[str, object]:
    """Measure growth and standing memory of one shape in new processes. Return bytes, the largest over the ranks."""
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

    # The matmul library's own buffers do not count, and neither does the memory for modules that a first call loads.
    a @ b
    symm_overlap.all_gather_matmul(a[:1, :8].contiguous(), [b[:8, :8].contiguous()], 0, rank.group_name)
    before = meter.standing()
    for _ in range(_CALLS):
        output_bytes = call()
    rank.start.wait()
    standing = meter.standing() - before
    growth = meter.growth(lambda: [call() for _ in range(_CALLS)]) - output_bytes
    return {"growth_bytes": growth, "standing_bytes": standing}


def meter_of(device: torch.device) -> Meter:
    """Return the meter for the memory of a device."""
    return _CudaMeter() if device.type == "cuda" else _CpuMeter()


def why_not(device: str) -> str:
    """Return the reason why memory cannot be measured here, or an empty string if it can."""
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
        """Return the memory in use now."""

    def growth(self, work: Callable[[], object]) -> int:
        """Run ``work``. Return how far memory rose above its level at the start."""


class _CpuMeter:
    """Resident memory of this process, in bytes."""

    def standing(self) -> int:
        """Return the process's share of memory. A page that several ranks map counts in equal parts for each."""
        _C.release_kept_outputs()
        return _kilobytes(Path("/proc/self/smaps_rollup"), "Pss:")

    def growth(self, work: Callable[[], object]) -> int:
        """Run `work`. Return how far resident memory rose above its level at the start."""
        _C.release_kept_outputs()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present level
        before = _kilobytes(Path("/proc/self/status"), "VmHWM:")
        work()
        return _kilobytes(Path("/proc/self/status"), "VmHWM:") - before


class _CudaMeter:
    """Memory of the current CUDA device, in bytes."""

    def standing(self) -> int:
        """Return the memory allocated in torch's caching allocator plus memory outside it, such as symmetric memory."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()

    def growth(self, work: Callable[[], object]) -> int:
        """Run `work`. Return how far allocated memory rose above its level at the start."""
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
    """Set environment variables for processes that are started inside."""
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
