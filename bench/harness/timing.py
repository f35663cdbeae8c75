"""Time methods against each other: shuffled rounds, ranks lined up before each call, median on each rank.

On CPU a call is timed by the host clock. On CUDA the L2 cache is flushed first, and the flush is long enough for the
host to enqueue the whole call behind it, so events around the call see no launch gaps; a stream-ordered collective
then lines the GPUs up.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.harness.launch import Rank


@dataclass(frozen=True)
class Timed:
    """A function to time, the context in which its calls run (entered outside the timed part), and how many operations
    a call makes: times are those of one.
    """

    call: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    operations: int = 1


def time_methods(
    rank: Rank, methods: Mapping[str, Timed], rounds: int, *, warm_up: int = 3, seed: int = 0, fill_ms: float = 20.0
) -> dict[str, list[float]]:
    """Milliseconds of an operation, in every call of every method on this rank; all ranks pass the same methods.

    A round calls every method, in an order that is shuffled anew (the same on all ranks). A method much quicker than
    `fill_ms` is called up to 10 times a round, since a median over few short calls is mostly noise.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give 1 or more")
    timer = _CudaTimer(rank) if rank.device.type == "cuda" else _CpuTimer(rank)
    repeats = {name: _repeats(rank, timer, method, warm_up, fill_ms) for name, method in methods.items()}
    samples: dict[str, list[float]] = {name: [] for name in methods}
    order = list(methods)
    shuffler = random.Random(seed)
    gc.collect()
    gc.disable()  # a collection in one rank would be charged to whatever is being timed
    try:
        for _ in range(rounds):
            shuffler.shuffle(order)
            for name in order:
                method = methods[name]
                with method.around():
                    spent = [timer.time(method.call) for _ in range(repeats[name])]
                samples[name].extend(each / method.operations for each in spent)
    finally:
        gc.enable()
    return samples


def issue_times(rank: Rank, methods: Mapping[str, Timed], calls: int = 20) -> dict[str, dict[str, float]]:
    """What an operation costs the host, and how quickly operations follow one another, on this rank.

    ``host_us``: until a call returns that finds the device idle, the median of ``calls``. ``each_ms``: of so many calls
    in a row, from the first one to the end of the last one. Both are divided by the operations of a call.
    """
    synchronize = torch.cuda.synchronize if rank.device.type == "cuda" else lambda: None
    found = {}
    for name, method in methods.items():
        with method.around():
            spent = []
            for _ in range(calls):
                synchronize()
                rank.start.wait()
                begin = time.perf_counter()
                method.call()
                spent.append(time.perf_counter() - begin)
            synchronize()
            rank.start.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                method.call()
            synchronize()
            each = (time.perf_counter() - begin) / calls
        found[name] = {
            "host_us": statistics.median(spent) / method.operations * 1e6,
            "each_ms": each / method.operations * 1e3,
        }
    return found


def over_ranks(samples: list[list[float]]) -> dict[str, object]:
    """Median on each rank, then the largest over the ranks: a collective is as fast as its slowest rank."""
    medians = [statistics.median(one) for one in samples]
    return {
        "median_ms": max(medians),
        "min_ms": max(min(one) for one in samples),
        "max_ms": max(max(one) for one in samples),
        "rank_median_ms": medians,
        "calls": len(samples[0]),
    }


def _repeats(rank: Rank, timer: _Timer, method: Timed, warm_up: int, fill_ms: float) -> int:
    with method.around():
        spent = [timer.time(method.call) for _ in range(max(1, warm_up))]
    slowest = max(rank.all(min(spent)))  # agreed by all ranks: they must make the same calls
    return max(1, min(10, int(fill_ms / max(slowest, 1e-6))))


class _Timer:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def time(self, call: Callable[[], object]) -> float:
        raise NotImplementedError


class _CpuTimer(_Timer):
    def time(self, call: Callable[[], object]) -> float:
        self._rank.start.wait()
        begin = time.perf_counter()
        result = call()
        end = time.perf_counter()
        del result  # freed after the clock has stopped: nobody else's method frees inside the timed part either
        return (end - begin) * 1e3


class _CudaTimer(_Timer):
    _FLUSH_BYTES = 1 << 30  # far more than any L2, and about 0.3 ms a pass on an H100
    _PASSES = 4

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._flush = torch.empty(self._FLUSH_BYTES, dtype=torch.uint8, device=rank.device)
        self._token = torch.zeros(1, device=rank.device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        self._rank.start.wait()
        for _ in range(self._PASSES):
            self._flush.zero_()
        if self._rank.backend == "nccl":
            dist.all_reduce(self._token)  # in stream order, so the GPUs themselves start together
        self._begin.record()
        result = call()
        self._end.record()
        torch.cuda.synchronize()
        del result
        return float(self._begin.elapsed_time(self._end))
