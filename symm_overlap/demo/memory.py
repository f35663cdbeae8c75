"""The peak memory of a training step: all memory that a model has needed since before it was made.

On a CPU torch's profiler lists every piece of memory that tensors get and give back: parameters, gradients, optimizer
state, activations, what is gathered, temporaries inside ops, and symmetric memory. What torch does not allocate, such
as buffers of gloo, is not in it. What a thread of gloo is the last to let go is not seen to be freed, so that a figure
may be too high by such a tensor. On a GPU the caching allocator counts, and what the device lost beside it is added:
symmetric memory, and buffers of NCCL.
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
"""So many are taken. The last one is measured: the first two set up the optimizer's state and the buckets of DDP."""
MEASURED = "peak memory: measured step"


def peaks(makers: Sequence[Callable[[], Trainer]], windows: Tensor, device: torch.device) -> list[int]:
    """For each trainer that is made, the peak in bytes of a step on ``windows``, on the rank that needs most.

    Each is made, measured and dropped before the next one. Collective over all ranks. The first is measured twice, and
    counts the second time, because workspaces that all of them share stay where they are.
    """
    found = []
    for make in (makers[0], *makers):
        gc.collect()  # what an earlier one has left behind is not to be freed while this one is measured
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
    """The most memory that is in use at once in the measured step, of a trace that shows every allocation."""
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
    """What is in use on this GPU beside the memory of torch's caching allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


_MEASURES = {"cpu": _on_cpu, "cuda": _on_cuda}
