"""Latency of the synchronisation primitives of symmetric memory on CPU: barrier, and signal with wait.

    python -m bench.primitives --json result.json

Targets for the barrier's median: 2 microseconds for 2 ranks, each on its own core, and 60 for 4 ranks on 2 cores (where
waiting ranks must yield their core). A ping-pong is a signal to the peer and one back. Its row shows half of the round
trip.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, launch
from bench.harness.report import environment_lines
from bench.harness.symmetric import symmetric_empty

CORES = 2
_BLOCK = 50
# Target in microseconds for each number of ranks. The ranks share CORES cores.
BARRIER_TARGET_US = {2: 2.0, 4: 60.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every barrier target is met, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.primitives", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000, help="calls of each primitive (default 20000)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"--calls is {options.calls}; give 1 or more")
    described = environment("cpu", max(BARRIER_TARGET_US), 1)
    print(environment_lines(described), flush=True)
    print(f"\n  {'primitive':12}{'ranks':>6}{'cores':>6}{'median us':>11}{'p99 us':>10}{'target us':>11}")
    rows: list[dict[str, Any]] = []
    for world, target in BARRIER_TARGET_US.items():
        for row in over_ranks(launch(_run, world, "cpu", options.calls)):
            if row["primitive"] == "barrier":
                row["target_us"] = target
            rows.append(row)
            wanted = row.get("target_us")
            verdict = "" if wanted is None else f"{wanted:>11.1f}  {'met' if row['median_us'] <= wanted else 'MISSED'}"
            figures = f"{row['median_us']:>11.2f}{row['p99_us']:>10.2f}"
            print(f"  {row['primitive']:12}{row['world']:>6}{row['cores']:>6}{figures}{verdict}", flush=True)
    write_json(options.json, described, rows=rows)
    return 0 if all(row["median_us"] <= row.get("target_us", row["median_us"]) for row in rows) else 1


def over_ranks(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each primitive, with the figures of its slowest rank."""
    return [max(same, key=lambda row: row["median_us"]) for same in zip(*ranks, strict=True)]


def _run(rank: Rank, calls: int) -> list[dict[str, Any]]:
    cores = _share_cores(rank)
    symmetric = symmetric_empty(rank, 1, dtype=torch.float32)
    handle = symmetric.handle

    def ping_pong() -> None:
        peer = 1 - rank.rank
        if rank.rank == 0:
            handle.put_signal(dst_rank=peer, channel=1)
            handle.wait_signal(src_rank=peer, channel=1)
        else:
            handle.wait_signal(src_rank=peer, channel=1)
            handle.put_signal(dst_rank=peer, channel=1)

    primitives: dict[str, tuple[Callable[[], object], int]] = {"barrier": (handle.barrier, 1)}
    if rank.world == 2:
        primitives["ping-pong"] = ping_pong, 2
    rows = []
    for name, (call, parts) in primitives.items():
        means = [mean / parts for mean in _blocks_us(rank, call, calls)]
        median, p99 = statistics.median(means), statistics.quantiles(means, n=100, method="inclusive")[98]
        rows.append({"primitive": name, "world": rank.world, "cores": cores, "median_us": median, "p99_us": p99})
    return rows


def _share_cores(rank: Rank) -> int:
    """Pin the ranks to the first `CORES` cores, one core a rank if there are enough. Return the number of cores."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores if rank.world > len(cores) else [cores[rank.rank]])
    return len(cores)


def _blocks_us(rank: Rank, call: Callable[[], object], calls: int) -> list[float]:
    """Return the mean time of one call in microseconds, for each block of `_BLOCK` calls back to back on all ranks.

    Timing single calls would give figures that are too low: the rank that arrives last passes at once, and only its
    next call takes longer.
    """
    for _ in range(_BLOCK):
        call()
    rank.start.wait()
    means = []
    gc.disable()
    try:
        for _ in range(max(2, calls // _BLOCK)):
            begin = time.perf_counter_ns()
            for _ in range(_BLOCK):
                call()
            means.append((time.perf_counter_ns() - begin) / _BLOCK / 1e3)
    finally:
        gc.enable()
    return means


if __name__ == "__main__":
    sys.exit(main())
