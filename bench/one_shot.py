"""Time a small all-reduce in one shot (every rank computes the whole sum) and shared out (each rank sums a part).

    python -m bench.one_shot --json result.json

The table shows up to which size one shot is quicker, which is the threshold `Traits.most_bytes_in_one_shot`. It uses
two CPU ranks, float32 and the path ``sequential``. The two ways take turns in blocks of ten calls, which all ranks
start together. A figure is the time of one call: the median over blocks on the slower rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import torch

import symm_overlap
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, launch
from bench.harness.report import environment_lines
from symm_overlap.collective.choosing import chooser
from symm_overlap.runtime import state_of

WORLD, BLOCK = 2, 10
KIB = (2, 8, 32, 64, 128, 256, 512, 1024)  # sizes of each rank's tensor
LIMITS = {"one shot": 1 << 60, "shared out": -1}  # replacements for the threshold that force each way at every size


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if one shot is quicker at every size up to the threshold, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.one_shot", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=60, help="blocks of ten calls for each way (default 60)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.blocks < 1:
        parser.error(f"--blocks is {options.blocks}; give 1 or more")
    described = environment("cpu", WORLD, 1)
    print(environment_lines(described), flush=True)
    ranks = launch(_run, WORLD, "cpu", options.blocks)
    most = chooser.TRAITS["cpu"].most_bytes_in_one_shot
    print(f"\n  {'KiB a rank':>10}{'one shot, us':>14}{'shared out, us':>16}{'ratio':>8}")
    rows, met = [], True
    for index, kib in enumerate(KIB):
        once, shared = (max(rank[way][index] for rank in ranks) for way in LIMITS)
        chosen = WORLD * kib * 1024 <= most
        met = met and (not chosen or once <= shared)
        rows.append({"kib": kib, "one_shot_us": once, "shared_out_us": shared, "chosen": chosen})
        print(f"  {kib:>10}{once:>14.1f}{shared:>16.1f}{once / shared:>8.2f}{'  chosen' if chosen else ''}")
    print(f"\n  {'met' if met else 'MISSED'}: one shot is quicker at every size at which it is chosen")
    write_json(options.json, described, rows=rows)
    return 0 if met else 1


def _run(rank: Rank, blocks: int) -> dict[str, list[float]]:
    traits = chooser.TRAITS["cpu"]
    found: dict[str, list[float]] = {way: [] for way in LIMITS}
    for kib in KIB:
        X = torch.randn(kib * 1024 // 256, 64)
        times: dict[str, list[float]] = {way: [] for way in LIMITS}
        for _ in range(blocks):
            for way, limit in LIMITS.items():
                chooser.TRAITS["cpu"] = dataclasses.replace(traits, most_bytes_in_one_shot=limit)
                chooser._choose.cache_clear()
                state_of(rank.group).routes.clear()
                with symm_overlap.force_path("sequential"):
                    symm_overlap.all_reduce(X, "sum", rank.group)
                    rank.start.wait()
                    begin = time.perf_counter_ns()
                    for _ in range(BLOCK):
                        symm_overlap.all_reduce(X, "sum", rank.group)
                    times[way].append((time.perf_counter_ns() - begin) / BLOCK / 1e3)
        for way in LIMITS:
            found[way].append(statistics.median(times[way]))
    return found


if __name__ == "__main__":
    sys.exit(main())
