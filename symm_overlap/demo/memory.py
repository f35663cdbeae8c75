"""The peak memory of a training step. It counts all memory that was allocated from the creation of the model on.

On CPU, torch's profiler records every allocation and release of tensor memory: parameters, gradients, optimizer state,
activations, gathered parameters, temporaries inside ops, and symmetric memory. Memory that torch does not allocate,
such as buffers of gloo, is not counted. If a thread of gloo is the last owner of a tensor, the profiler does not see
its release, so the peak may be too high by the size of that tensor. On a GPU, the caching allocator reports the peak.
The GPU memory that was used outside of it is added: symmetric memory and buffers of NCCL.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from symm_overlap.demo.timeline import trace_to
from symm_overlap.demo.trainer import Trainer

STEPS = 3
"""The number of steps to run. Only the last one is measured. The first two set up the state of the optimizer and the
buckets of DDP."""
MEASURED = "peak memory: measured step"


def peaks(makers: Sequence[Callable[[], Trainer]], windows: Tensor, device: torch.device) -> list[int]:
    """Return for each trainer the peak memory of a step on ``windows``, in bytes, on the rank that needs the most.

    Each trainer is created, measured and released before the next one is created. This call is collective over all
    ranks. The first trainer is measured twice and only the second measurement is used, because the workspaces that all
    trainers share are allocated in the first one and stay allocated.
    """
    found = []
    for make in (makers[0], *makers):
        gc.collect()  # otherwise garbage of an earlier trainer could be freed while this one is measured
        found.append(_MEASURES[device.type](make, windows))
    most = torch.tensor(found[1:], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [int(peak) for peak in most]


def _on_cpu(make: Callable[[], Trainer], windows: Tensor) -> int:
    with tempfile.TemporaryDirectory(prefix="symm_overlap_memory_") as folder:
        path = Path(folder) / "trace.json"
        with trace_to(str(path), memory=True):
            trainer = make()
            for _ in range(STEPS - 1):
                trainer.step(windows)
            with record_function(MEASURED):
                trainer.step(windows)
        return peak_in(json.loads(path.read_text())["traceEvents"])


def peak_in(events: Sequence[dict[str, object]]) -> int:
    """Return the most memory that is in use at once during the measured step, from a trace with every allocation."""
    start, end = next(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))  # type: ignore[arg-type]
        for event in events
        if event.get("name") == MEASURED and event.get("ph") == "X"
    )
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Bytes"]))  # type: ignore[arg-type,index]
        for event in events
        if event.get("name") == "[memory]"
    )
    used = peak = 0
    for time, change in changes:
        if time > end:
            break
        before, used = used, used + change
        peak = max(peak, before, used) if time >= start else used
    return peak


def _on_cuda(make: Callable[[], Trainer], windows: Tensor) -> int:
    outside, inside = _outside(), torch.cuda.memory_allocated()
    trainer = make()
    for _ in range(STEPS - 1):
        trainer.step(windows)
    torch.cuda.reset_peak_memory_stats()
    trainer.step(windows)
    return torch.cuda.max_memory_allocated() - inside + max(0, _outside() - outside)


def _outside() -> int:
    """Return the bytes in use on this GPU outside of torch's caching allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


_MEASURES = {"cpu": _on_cpu, "cuda": _on_cuda}
