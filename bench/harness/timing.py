"""Time methods against each other: in shuffled rounds, with a barrier of all ranks before each call.

On CPU a call is timed by the host clock. On CUDA the L2 cache is flushed first. The flush takes long enough for the
host to enqueue the whole call behind it, so the events around the call measure no launch gaps. After the flush, a
stream-ordered collective lets all GPUs start together.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.harness.launch import Rank
from bench.harness.unrepeated import unrepeated

SERIES = 2
"""The number of series of calls back to back of each kind."""


@dataclass(frozen=True)
class Timed:
    """A function to time, the context in which its calls run (entered outside the timed part), and the number of
    operations in a call. Reported times are those of one operation.
    """

    call: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    operations: int = 1


def time_methods(
    rank: Rank, methods: Mapping[str, Timed], rounds: int, *, warm_up: int = 3, seed: int = 0, fill_ms: float = 20.0
) -> dict[str, list[float]]:
    """Return the milliseconds of an operation, for every call of every method on this rank.

    All ranks must pass the same methods. Each round calls every method in a new random order, which is the same on all
    ranks. A method much quicker than `fill_ms` is called up to 10 times a round, because the median over few short
    calls is mostly noise.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give 1 or more")
    timer = timer_of(rank)
    repeats = {name: _repeats(rank, timer, method, warm_up, fill_ms) for name, method in methods.items()}
    samples: dict[str, list[float]] = {name: [] for name in methods}
    order = list(methods)
    shuffler = random.Random(seed)
    gc.collect()
    gc.disable()  # the time of a garbage collection would be added to the method that is being timed
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
    """Measure an operation's time on the host, and its time in a series of calls back to back, on this rank.

    ``host_us``: the time until a call returns if the device is idle at the start, the median of ``calls`` calls.
    ``ahead_us``: the same in series of calls back to back, in which the host's caches stay warm, as in a model whose
    host runs ahead of the device. ``usual_us``: the same in series in which no call repeats an earlier one. The two
    kinds of series take turns, because the speed of a machine may change. ``each_ms``: the time of the first kind of
    series until the device is done, divided by the number of calls. All are divided by the number of operations in a
    call.
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
            series: dict[bool, list[float]] = {True: [], False: []}
            each = []
            for usual in (False, True) * SERIES:
                with unrepeated() if usual else nullcontext():
                    synchronize()
                    rank.start.wait()
                    returned = [time.perf_counter()]
                    for _ in range(-(-calls // SERIES)):
                        method.call()
                        returned.append(time.perf_counter())
                    synchronize()
                    series[usual] += [end - begin for begin, end in itertools.pairwise(returned)]
                    if not usual:
                        each.append((time.perf_counter() - returned[0]) / (len(returned) - 1))
        found[name] = {
            "host_us": statistics.median(spent) / method.operations * 1e6,
            "ahead_us": statistics.median(series[False]) / method.operations * 1e6,
            "usual_us": statistics.median(series[True]) / method.operations * 1e6,
            "each_ms": statistics.mean(each) / method.operations * 1e3,
        }
    return found


def over_ranks(samples: list[list[float]]) -> dict[str, object]:
    """Return the median on each rank, then the largest over the ranks: a collective is as slow as its slowest rank."""
    medians = [statistics.median(one) for one in samples]
    return {
        "median_ms": max(medians),
        "min_ms": max(min(one) for one in samples),
        "max_ms": max(max(one) for one in samples),
        "rank_median_ms": medians,
        "calls": len(samples[0]),
    }


def _repeats(rank: Rank, timer: Timer, method: Timed, warm_up: int, fill_ms: float) -> int:
    with method.around():
        spent = [timer.time(method.call) for _ in range(max(1, warm_up))]
    slowest = max(rank.all(min(spent)))  # the same value on all ranks, because they must make the same calls
    return max(1, min(10, int(fill_ms / max(slowest, 1e-6))))


class Timer:
    """Times one call, which starts on all ranks together."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def time(self, call: Callable[[], object]) -> float:
        """Make the call, and return its time in milliseconds."""
        raise NotImplementedError


def timer_of(rank: Rank) -> Timer:
    """Return a timer for calls on the rank's device."""
    return _CudaTimer(rank) if rank.device.type == "cuda" else _CpuTimer(rank)


class _CpuTimer(Timer):
    def time(self, call: Callable[[], object]) -> float:
        self._rank.start.wait()
        begin = time.perf_counter()
        result = call()
        end = time.perf_counter()
        del result  # freed after the clock has stopped, so that no method frees memory inside the timed part
        return (end - begin) * 1e3


class _CudaTimer(Timer):
    _FLUSH_BYTES = 1 << 30  # far more than any L2 cache; a pass takes about 0.3 ms on an H100
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
            dist.all_reduce(self._token)  # in stream order, so that the GPUs themselves start together
        self._begin.record()
        result = call()
        self._end.record()
        torch.cuda.synchronize()
        del result
        return float(self._begin.elapsed_time(self._end))
