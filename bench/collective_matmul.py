"""Benchmark of collective matmul: ours, its bounds, the plain collective with a matmul, and torch's own op.

    python -m bench.collective_matmul --device cpu --world 2 --shapes cpu --json result.json
    torchrun --nproc-per-node 8 -m bench.collective_matmul --device cuda --shapes llama
    python -m bench.collective_matmul --device cuda --emulate 8 --link 369GB/s --shapes llama

Rows for each shape: matmul alone (whole, not split), copies alone, plain collective + matmul, torch's op if it can
run, ours, ours without waits, ours without waits and copies. Methods are shuffled between rounds. A time is the median
on each rank, then the largest over the ranks. Before timing, every method's result is checked: exactly on 0/1 inputs,
and by relative error on normally distributed inputs.

Under torchrun, the benchmark uses torchrun's ranks. With ``--emulate W`` there is one real rank, and its peers are only
memory behind a link of a chosen speed (`bench.emulation`). One GPU is then enough to measure overlap, but not the
effects that ranks have on each other. ``host us`` is the time until a call returns if the GPU is idle, ``ahead us`` the
same in a series of calls back to back, as when the host runs ahead of the GPU, ``usual us`` the same if no call repeats
an earlier one, and ``each ms`` the time of a call in series of the first kind. A link with a chosen speed adds launches
to all of them. With ``--graph N`` every method is timed in a CUDA graph of N operations, and a time is that of one
operation.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.emulation.launches import listed
from bench.emulation.link import Link
from bench.emulation.run import run_emulated
from bench.emulation.targets import emulated_verdicts
from bench.harness import memory, shapes
from bench.harness.case import OPS, Case
from bench.harness.environment import environment
from bench.harness.exposed import Profiling, exposed_table
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, first_rank, launch, leave, under_torchrun
from bench.harness.report import case_table, environment_lines, memory_header, memory_line
from bench.harness.run_case import run_case
from bench.harness.targets import means, memory_verdicts, speed_verdicts
from bench.methods import METHODS
from bench.methods.emulated import METHODS as EMULATED
from bench.methods.graphs import in_graphs
from bench.methods.method import Method
from symm_overlap.profile.report import LEGEND

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 0 if every checked result is right, 1 if one is wrong, 2 for bad arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        cases = _cases(options)
    except ValueError as error:
        parser.error(str(error))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU; use --device cpu")
    if options.launches:
        print("\n".join(listed(case, Link.parse(options.link)) for case in cases), end="")
        return 0
    described = environment(options.device, 1 if options.emulate else options.world, options.threads)
    if first_rank():
        print(environment_lines(described), flush=True)
    result = _emulated(options, cases) if options.emulate else _measured(options, cases)
    if not first_rank():
        return 0
    if options.exposed:
        print(f"\n{LEGEND}")
    write_json(options.json, described, **result)
    wrong = [row for row in result["rows"] if not row.get("ok", True)]
    for row in wrong:
        print(f"wrong result: {row['op']} {row['method']} m={row['m']} n={row['n']} k={row['k']}", file=sys.stderr)
    link = result.get("link", {})
    if "stopped" in link:
        print(f"stopped at {link['stopped']}", file=sys.stderr)
    return 1 if wrong or link.get("kept") is False or "stopped" in link else 0


def _measured(options: argparse.Namespace, cases: Sequence[Case]) -> dict[str, Any]:
    """Measure real ranks on this host."""
    given = options.methods, options.graph, options.rounds, options.seed, _profiling(options)
    rows = launch(_run, options.world, options.device, cases, *given, threads=options.threads)[0]
    sizes = [] if options.no_memory or under_torchrun() else _memory(options, cases)
    found = [] if options.graph else speed_verdicts(rows) + memory_verdicts(sizes)
    if first_rank():
        print("\nTargets (they apply to the default options):")
        none = _none(options, "no op of this package was timed")
        print("\n".join(str(one) for one in [*found, *means(rows)]) or none)
    return {"rows": rows, "memory": sizes, "targets": [one.as_dict() for one in found]}


def _emulated(options: argparse.Namespace, cases: Sequence[Case]) -> dict[str, Any]:
    """Measure one real rank whose peers are phantoms."""
    link, threads = Link.parse(options.link), torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        methods = _methods(EMULATED, options.methods, options.graph)
        rows, reached = run_emulated(
            *(options.emulate, options.device, link, cases, methods, options.rounds, options.seed),
            _profiling(options),
        )
    finally:
        torch.set_num_threads(threads)
    found = [] if options.graph else emulated_verdicts(rows)
    print("\nTargets (they apply to 8 ranks of an H100 and a link of 369GB/s):")
    none = _none(options, "the methods that the targets compare were not timed")
    print("\n".join(str(one) for one in found) or none)
    return {"rows": rows, "memory": [], "link": reached, "targets": [one.as_dict() for one in found]}


def _profiling(options: argparse.Namespace) -> Profiling | None:
    return Profiling(options.traces, options.nvtx) if options.exposed or options.nvtx else None


def _none(options: argparse.Namespace, reason: str) -> str:
    """Return the line that says why no target was judged."""
    return "  none: the targets apply to calls outside of CUDA graphs" if options.graph else f"  none: {reason}"


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.collective_matmul", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 2
    parser.add_argument(
        "--world", type=int, default=world, help="number of ranks, all on this host (default %(default)s)"
    )
    parser.add_argument(
        "--emulate", type=int, metavar="W", help="emulate W ranks: 1 real rank and W - 1 peers that are only memory"
    )
    parser.add_argument(
        "--link", default="369GB/s", help="with --emulate: a speed, 'pcie' or 'device' (default %(default)s)"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["cpu"],
        metavar="SET|M,N,K",
        help=f"sets of shapes ({', '.join(shapes.SETS)}), or M,N,K where M counts the gathered rows",
    )
    parser.add_argument("--ops", default="ag,rs", help="ag, rs, ar, separated by commas (default ag,rs)")
    parser.add_argument(
        "--launches", action="store_true", help="with --emulate: only list what one call would launch on a GPU"
    )
    parser.add_argument(
        "--transposed", action="store_true", help="store weights as nn.Linear does: B is a view W.t() of W"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default float32 on CPU, bfloat16 on CUDA")
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds; each one calls all methods in a new random order (default 15)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"methods to time: {', '.join(METHODS)}; with --emulate: {', '.join(EMULATED)} (default all)",
    )
    parser.add_argument("--graph", type=int, metavar="N", help="on CUDA, time N operations in a CUDA graph")
    parser.add_argument(
        "--exposed", action="store_true", help="also record calls with torch's profiler, and show what is exposed"
    )
    parser.add_argument(
        "--nvtx", action="store_true", help="also make calls in NVTX ranges, for a run under Nsight Systems"
    )
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="with --exposed: write the traces, for symm-overlap profile"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffling (default 0)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    add_json_option(parser)
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    """Return a case for every requested op on every shape meant for it."""
    if options.world < 1 or options.rounds < 1 or options.threads < 1:
        raise ValueError("--world, --rounds and --threads must be 1 or more")
    if options.graph is not None and (options.graph < 1 or options.device != "cuda"):
        raise ValueError(
            f"--graph {options.graph} --device {options.device}: give --graph 1 or more, with --device cuda"
        )
    if (options.exposed or options.nvtx) and options.graph is not None:
        raise ValueError(
            "a profiler needs the ranges of calls, and replays of a CUDA graph have none: leave out --graph"
        )
    if options.nvtx and (options.exposed or options.device != "cuda"):
        raise ValueError("--nvtx is for Nsight Systems: give it with --device cuda, and without --exposed")
    if options.traces is not None:
        if not options.exposed:
            raise ValueError("--traces writes what --exposed has recorded: give --exposed too")
        options.traces.mkdir(parents=True, exist_ok=True)
    if options.emulate is not None:
        if options.emulate < 2 or under_torchrun():
            raise ValueError(
                f"--emulate {options.emulate}: give 2 ranks or more; one process emulates them, and not under torchrun"
            )
        Link.parse(options.link)
    elif options.launches:
        raise ValueError("--launches lists the launches of an emulated call: give --emulate W too")
    world = options.emulate or options.world
    known = METHODS if options.emulate is None else EMULATED
    if unknown := [name for name in options.methods or () if name not in known]:
        raise ValueError(f"--methods has {', '.join(unknown)}; give some of {', '.join(known)}")
    ops = options.ops.split(",")
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"--ops has {', '.join(unknown)}; give some of {', '.join(OPS)}")
    dtype = DTYPES[options.dtype or ("float32" if options.device == "cpu" else "bfloat16")]
    return [
        Case(OPS[op], shape.m, shape.n, shape.k, dtype, world, shape.label, options.transposed)
        for op in ops
        for shape in shapes.parse(options.shapes, world)
        if op in shape.ops
    ]


def _methods(known: Mapping[str, Method], names: Sequence[str] | None, graph: int | None) -> list[Method]:
    """Return the named methods, or all. With ``graph``, their calls run in CUDA graphs of so many operations."""
    chosen = [method for name, method in known.items() if not names or name in names]
    return [in_graphs(method, graph) for method in chosen] if graph else chosen


def _run(
    rank: Rank,
    cases: Sequence[Case],
    names: Sequence[str] | None,
    graph: int | None,
    rounds: int,
    seed: int,
    profiling: Profiling | None,
) -> list[dict[str, Any]]:
    """Run all cases on one rank and return the rows. Rank 0 prints each table as soon as its case is done."""
    rows: list[dict[str, Any]] = []
    methods = _methods(METHODS, names, graph)
    titles = {method.name: method.title for method in methods}
    for case in cases:
        found = run_case(rank, case, methods, rounds, seed, issue=under_torchrun(), profiling=profiling)
        rows += found
        if rank.rank == 0:
            by_method = {row["method"]: row for row in found}
            print(f"\n{case}", case_table(by_method, titles), sep="\n", flush=True)
            if table := exposed_table(by_method, titles):
                print(table, flush=True)
    return rows


def _memory(options: argparse.Namespace, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measure growth and standing memory for the all-gather shapes that are large enough to show them."""
    large = [case for case in cases if case.gathers and case.gathered_bytes >= memory.MIN_GATHERED_BYTES]
    chosen = {case.gathered_bytes: case for case in large}.values()
    reason = memory.why_not(options.device) if chosen else "no all-gather shape is large enough"
    if reason:
        print(f"\nMemory: not measured: {reason}")
        return []
    print("\nMemory of all_gather_matmul, largest over ranks; growth is the peak of later calls minus their output")
    print(memory_header(), flush=True)
    found = []
    for case, return_A in itertools.product(chosen, (False, True)):
        found.append(memory.measure(case, options.device, options.threads, return_A=return_A))
        print(memory_line(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    leave(main())
