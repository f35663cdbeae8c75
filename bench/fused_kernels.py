"""The fused kernels alone, compared with the library's matmul: every flag is up already, and nothing is copied.

    python -m bench.fused_kernels --json result.json
    TRITON_INTERPRET=1 python -m bench.fused_kernels --device cpu --shapes 64,32,16 --rounds 1

This measures the matmul inside the kernels of the path ``fused``, on one GPU. Each kernel runs with the tiles that
`symm_overlap.kernels.configuration` chooses, and with a few others, so that one run shows which tiles would be better.
Methods take turns in a new random order in each round, because a GPU's clock depends on what it has done before.
Results are checked first: all sums are whole numbers that bfloat16 represents, and every bit must be right.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.report import environment_lines
from bench.harness.targets import Verdict
from symm_overlap.collective.exchange.fused.stream_flags import StreamFlags
from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import INTERPRETER, Configuration, configure, programs
from symm_overlap.kernels.factor import Factor
from symm_overlap.kernels.flags import Caller, Flags
from symm_overlap.kernels.place import Machine, Place
from symm_overlap.runtime import backend_of

WORST, MEAN = 1 / 0.90, 1 / 0.95  # time of a kernel / time of the library's matmul
WORLD, CHUNKS = 8, 1
OPS = ("all_gather_matmul", "matmul_reduce_scatter")
SHAPES = ("8192,3584,8192", "8192,7168,8192", "8192,14336,8192", "8192,28672,8192", "8192,8192,3584")
_SECONDS = 30.0  # the limit of a wait for a flag; no flag is down
_SLEEP_CYCLES = 1_000_000  # about half a millisecond, in which the host launches the calls behind it
_LONG = 2e-3  # seconds of work between two events, so that their uncertainty does not count


@dataclass(frozen=True)
class Variant:
    """A way to run a kernel: its tiles, and how many programs there are."""

    name: str
    tiles: Configuration
    programs: int


@dataclass(frozen=True)
class Product:
    """One product of gathered rows and a weight, with the memory for it."""

    m: int
    n: int
    k: int
    transposed: bool
    a: Tensor
    b: Tensor
    out: Tensor

    def fill(self, whole: bool) -> None:
        """Fill the factors: with 0 and 1, few enough of them that all sums are below 256; or with normal numbers."""
        for factor in (self.a, self.b):
            if whole:
                factor.copy_(torch.rand(factor.shape, device=factor.device) < min(0.5, math.sqrt(64 / self.k)))
            else:
                factor.normal_()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every result is right, 1 if one is wrong or missing, 2 for bad arguments."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.fused_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="M,N,K", help="M counts all ranks' rows")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in a random order (default 9)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU")
    device = backend_of(options.device).resolve(torch.device(options.device))
    described = environment(options.device, 1, 1)
    print(environment_lines(described), flush=True)
    rows: list[dict[str, Any]] = []
    stopped = None
    for op, shape, transposed in itertools.product(OPS, options.shapes, (False, True)):
        try:
            found = measure(op, product(shape, transposed, device), options.rounds)
        except (Exception, KeyboardInterrupt) as error:  # the rows that were measured are not lost
            traceback.print_exc()
            stopped = f"{op}, {shape}: {type(error).__name__}: {error}"
            break
        rows += found
        print("\n".join(map(line, found)), flush=True)
    judged = verdicts(rows)
    print("\nTargets (they apply to an H100):", *judged, sep="\n")
    write_json(options.json, described, rows=rows, targets=[one.as_dict() for one in judged], stopped=stopped)
    return 0 if stopped is None and all(row["ok"] for row in rows) else 1


def product(shape: str, transposed: bool, device: torch.device) -> Product:
    """Return the memory for a product of bfloat16."""
    m, n, k = map(int, shape.split(","))
    empty = partial(torch.empty, dtype=torch.bfloat16, device=device)
    return Product(m, n, k, transposed, empty(m, k), empty(n, k).t() if transposed else empty(k, n), empty(m, n))


def variants(chosen: Configuration, machine: Machine) -> list[Variant]:
    """Return the chosen tiles first, and then others that the same GPU can run, each different from the chosen ones."""
    usual = programs(machine.multiprocessors)
    found = [Variant("chosen", chosen, usual)]
    if not chosen.descriptors:
        return found
    wide = replace(chosen, tile_m=128, tile_n=256, warps=8, stages=4)
    narrow = replace(chosen, tile_m=128, tile_n=128, warps=4)
    return found + [
        variant
        for variant in (
            Variant("128x256, 4 stages", wide, usual),
            Variant("128x256, 3 stages", replace(wide, stages=3), usual),
            Variant("128x256, group 4", replace(wide, group=4), usual),
            Variant("128x256, all multiprocessors", wide, usual + 1),
            Variant("256x128, 4 stages", replace(wide, tile_m=256, tile_n=128, group=4), usual),
            Variant("128x128, 4 stages", replace(narrow, stages=4), usual),
            Variant("128x128, 2 programs each", replace(narrow, stages=3), 2 * usual),
        )
        if (variant.tiles, variant.programs) != (chosen, usual)
    ]


def measure(op: str, made: Product, rounds: int) -> list[dict[str, Any]]:
    """Check and time a kernel with every variant, and the library's matmul. Return a row for each variant."""
    device = made.out.device
    machine = Machine(*backend_of(device.type).machine(device))
    part = -(-made.m // WORLD)
    place = Place(0, made.m, part, part, CHUNKS, WORLD)
    chosen = configure(part, made.n, made.k, made.a.dtype, machine.architecture, all_rows=made.m)
    flags = raised(machine, device, op, place)
    calls: dict[str, Callable[[], object]] = {}
    tried = {variant.name: variant for variant in variants(chosen, machine)}
    for variant in tried.values():
        calls[variant.name] = launcher(op, made, flags, place, machine, variant)
    library = partial(torch.mm, made.a, made.b, out=made.out)
    made.fill(whole=True)
    library()
    expected = made.out.clone()
    right = {}
    for name, call in calls.items():
        made.out.fill_(float("nan"))
        call()
        right[name] = torch.equal(made.out, expected)
    made.fill(whole=False)
    times = timed({"library": library, **calls}, device, rounds)
    return [
        {
            "op": op, "m": made.m, "n": made.n, "k": made.k, "transposed": made.transposed, "variant": name,
            "tiles": repr(tried[name].tiles), "programs": tried[name].programs, "ok": right[name],
            "median_ms": times[name] * 1e3, "library_ms": times["library"] * 1e3,
            "over_library": times[name] / times["library"],
            "tflops": 2 * made.m * made.n * made.k / times[name] / 1e12,
        }
        for name in calls
    ]  # fmt: skip


def raised(machine: Machine, device: torch.device, op: str, place: Place) -> Flags:
    """Return flags that are all up, and stay up: no further call begins."""
    flags = Flags(device) if machine.architecture == INTERPRETER else StreamFlags(device, in_memory=False)
    count = place.world * place.chunks
    flags.begin(count, _SECONDS, Caller(op, "of a benchmark", 0, place.rank, place.world, place.chunks))
    for chunk in range(count):
        flags.up(chunk)
    return flags


def launcher(
    op: str, made: Product, flags: Flags, place: Place, machine: Machine, variant: Variant
) -> Callable[[], object]:
    """Return a function that launches a kernel of rank 0."""
    launch = getattr(load(op, machine.architecture), op)
    factor = Factor(made.b, made.out)
    # As many programs as a variant has are launched if one multiprocessor more is left free.
    where = machine._replace(multiprocessors=variant.programs + 1)
    given = (made.a[: place.rows], made.a, [factor]) if op == "all_gather_matmul" else (made.a, factor)
    return partial(launch, *given, flags, place, where, configuration=variant.tiles)


def timed(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median seconds of a call of each function."""
    many = {name: max(1, min(20, math.ceil(_LONG / _spent(call, device, 1)))) for name, call in calls.items()}
    order, shuffler = list(calls), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            samples[name].append(_spent(calls[name], device, many[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def _spent(call: Callable[[], object], device: torch.device, count: int) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SLEEP_CYCLES)
    start.record()
    for _ in range(count):
        call()
    stop.record()
    torch.cuda.synchronize()
    return max(1e-9, start.elapsed_time(stop) / 1e3 / count)


def line(row: dict[str, Any]) -> str:
    """Format a row."""
    layout = "W.t()" if row["transposed"] else "W"
    where = f"{row['op']:22} {row['m']}, {row['n']}, {row['k']} {layout:6}"
    speed = (
        f"{row['median_ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s, {1 / row['over_library']:5.3f} of the library's rate"
    )
    return f"  {where}{row['variant']:30}{speed}{'' if row['ok'] else '  WRONG'}"


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Judge the chosen tiles of each kernel, and show what the best tiles for each product would reach."""
    found = []
    for op in OPS:
        products: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in rows:
            if row["op"] == op:
                key = row["m"], row["n"], row["k"], "W.t()" if row["transposed"] else "W"
                products.setdefault(key, {})[row["variant"]] = row["over_library"]
        if not products:
            continue
        chosen = {key: ratios["chosen"] for key, ratios in products.items()}
        best = {key: min(ratios, key=ratios.__getitem__) for key, ratios in products.items()}
        mean = statistics.geometric_mean(chosen.values())
        ideal = statistics.geometric_mean(products[key][name] for key, name in best.items())
        worst = max(chosen, key=chosen.__getitem__)
        where = f"{len(chosen)} products; the best tiles: {ideal:.3f} ({', '.join(sorted(set(best.values())))})"
        what = f"{op}: kernel / library's matmul"
        found += [
            Verdict(f"{what}, geometric mean", MEAN, mean, where),
            Verdict(f"{what}, worst", WORST, chosen[worst], ", ".join(map(str, worst))),
        ]  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
