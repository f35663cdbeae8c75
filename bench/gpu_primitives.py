"""The CUDA primitives on one GPU: bandwidth of the fixed-order reduce, and the time of signals, waits and launches.

    python -m bench.gpu_primitives --json result.json

The reduce is compared with a plain copy, which shows the available bandwidth, and with torch's stack followed by sum.
The bandwidth counts the bytes that must be moved: each partial is read once, and the output is written once. Before
timing, the result is checked bit by bit. Calls alternate between sets of inputs, which are larger than the L2 cache. A
signal and its wait are launched back to back on one stream. Their time is therefore the cost of two tiny kernels, or of
two memory operations of the stream; a signal to many peers is a kernel in both cases. A signal to all peers, as at the
start of a call, also announces the call to each of them. No other GPU is involved: the peers are only memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import symm_overlap  # noqa: F401  registers the ops
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.report import environment_lines
from bench.harness.targets import Verdict
from symm_overlap import _C

MIB = 1 << 20
DTYPES = (torch.bfloat16, torch.float32)
WORLDS = (2, 4, 8)
COPY_OVER_REDUCE = 1 / 0.8  # bandwidth of a copy / bandwidth of the reduce
SLEEP_CYCLES = 20_000_000  # about 10 ms; 200 launches from Python take 1 ms, or more on a slow host


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every result is right, 1 if one is wrong, 2 without a GPU."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_primitives", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="size of the reduce's output in MiB (default 128)")
    parser.add_argument("--calls", type=int, default=50, help="timed calls of each method (default 50)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.mib < 1 or options.calls < 1:
        parser.error(f"--mib is {options.mib} and --calls {options.calls}; give 1 or more")
    if not torch.cuda.is_available() or not _C.with_cuda:
        parser.error("this command needs a GPU, and the extension compiled for it (SYMM_OVERLAP_CUDA=1)")
    described = environment("cuda", 1, 1)
    print(environment_lines(described), flush=True)
    lane = self_lane()
    rows = [row for dtype in DTYPES for row in reduce_rows(lane, dtype, options.mib * MIB, options.calls)]
    rows += signal_rows(False, options.calls)
    if _C.has_memory_operations(torch.cuda.current_device()):
        rows += signal_rows(True, options.calls)
    print(f"\n  {'primitive':24}{'dtype':>10}{'world':>7}{'median us':>11}{'GB/s':>8}{'of copy':>9}")
    for row in rows:
        rate = f"{row['gb_per_s']:>8.0f}{row['of_copy']:>9.2f}" if "of_copy" in row else ""
        wrong = "" if row.get("ok", True) else "  WRONG"
        print(
            f"  {row['primitive']:24}{row.get('dtype', ''):>10}{row['world']:>7}{row['median_us']:>11.2f}{rate}{wrong}"
        )
    judged = verdicts(rows)
    print("\nTargets:", *judged, sep="\n")
    write_json(options.json, described, rows=rows, targets=[one.as_dict() for one in judged])
    return 0 if all(row.get("ok", True) for row in rows) else 1


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Judge the bandwidth of the reduce, by its slowest row."""
    slow = [(1 / row["of_copy"], f"{row['dtype']}, world {row['world']}")
            for row in rows if row["primitive"] == "reduce_partials"]  # fmt: skip
    return [Verdict("bandwidth of a copy / of reduce_partials, worst", COPY_OVER_REDUCE, *max(slow))] if slow else []


def reduce_rows(lane: _C.CudaLane, dtype: torch.dtype, nbytes: int, calls: int) -> list[dict[str, Any]]:
    """Measure a copy, and for each world size reduce_partials and torch's stack followed by sum."""
    n = nbytes // dtype.itemsize
    out = torch.empty(n, dtype=dtype, device="cuda")
    sets = [[torch.randn(n, device="cuda").to(dtype) for _ in range(max(WORLDS))] for _ in range(2)]

    def row(primitive: str, world: int, call: Callable[[int], object], **more: object) -> dict[str, Any]:
        us = timed(lane, call, calls)
        gb_per_s = (world + 1) * nbytes / us / 1e3
        name = str(dtype).removeprefix("torch.")
        found = {"primitive": primitive, "dtype": name, "world": world, "median_us": us, "gb_per_s": gb_per_s}
        return {**found, **more}

    rows = [row("copy", 1, lambda turn: out.copy_(sets[turn % 2][0]))]
    for world in WORLDS:
        inputs = [partials[:world] for partials in sets]
        ok = reduces_right(inputs[0], out)
        ours = partial(reduce_call, torch.ops.symm_overlap.reduce_partials, inputs, out)
        rows.append(row("reduce_partials", world, ours, ok=ok))
        rows.append(row("stack, sum", world, partial(stack_call, inputs, out)))
    for found in rows:
        found["of_copy"] = found["gb_per_s"] / rows[0]["gb_per_s"]
    return rows


def reduce_call(op: Callable[..., None], inputs: Sequence[list[torch.Tensor]], out: torch.Tensor, turn: int) -> None:
    op(inputs[turn % len(inputs)], False, out)


def stack_call(inputs: Sequence[list[torch.Tensor]], out: torch.Tensor, turn: int) -> None:
    torch.sum(torch.stack(inputs[turn % len(inputs)]), 0, out=out)


def reduces_right(partials: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """True if every bit of the reduce equals the same additions made one after the other in float32."""
    out.fill_(float("nan"))
    torch.ops.symm_overlap.reduce_partials(partials, False, out)
    total = partials[0].to(torch.float32, copy=True)
    for other in partials[1:]:
        total += other.float()
    return torch.equal(out, total.to(out.dtype))


def self_lane(in_memory: bool = False, world: int = 1) -> _C.CudaLane:
    """Create a lane that signals by memory operations or by kernels. Its peers are memory of this process.

    A lane of one rank can signal itself.
    """
    words = _C.CudaLane.control_words(world, 1)
    blocks = torch.zeros(world, words, dtype=torch.int32, device="cuda")  # lives as long as the lane has a view of it
    hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(world if in_memory else 0)]
    peers = torch.tensor([blocks[rank].data_ptr() for rank in range(world)], dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    lane = _C.CudaLane(blocks[0], peers, 0, world, 1, "", hosts)
    lane.begin(0, 1, 10 * 10**9, call_hash=1 if world > 1 else 0, number=1)
    return lane


def signal_rows(in_memory: bool, calls: int) -> list[dict[str, Any]]:
    """Measure a signal with its wait, the end of a call that has not failed, and the host's time for a signal; and a
    signal to all peers.
    """
    lane, output, block = self_lane(in_memory), torch.zeros(1024, device="cuda"), 100

    def pairs(turn: int) -> None:
        for _ in range(block):
            lane.signal([0], 0)
            lane.wait([0], 0)

    def end(turn: int) -> None:
        for _ in range(block):
            lane.end([output])

    found = {(name, 1): timed(lane, call, calls) / block for name, call in (("signal + wait", pairs), ("end", end))}
    host = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        for _ in range(block):
            lane.signal([0], 0)
        host.append((time.perf_counter_ns() - start) / block / 1e3)
        torch.cuda.synchronize()  # empties the queue, so that no launch has to wait for room in it
    found["signal, host", 1] = statistics.median(host)
    for world in WORLDS:
        announcing, others = self_lane(in_memory, world), list(range(1, world))

        def to_all(turn: int, announcing: _C.CudaLane = announcing, others: list[int] = others) -> None:
            for _ in range(block):
                announcing.signal(others, 0)

        found["signal to all", world] = timed(announcing, to_all, calls) / block
        assert announcing.failure() is None
    assert lane.failure() is None
    how = " (memory)" if in_memory else ""
    return [{"primitive": name + how, "world": world, "median_us": us} for (name, world), us in found.items()]


def timed(lane: _C.CudaLane, call: Callable[[int], object], calls: int) -> float:
    """Return the median time of ``call(turn)`` on the GPU in microseconds, measured by events.

    A sleep on the stream ahead of the call hides the time of the launches.
    """
    for turn in range(3):
        call(turn)
    torch.cuda.synchronize()
    times = []
    for turn in range(calls):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        lane.sleep(SLEEP_CYCLES)
        start.record()
        call(turn)
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
