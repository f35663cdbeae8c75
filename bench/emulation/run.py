"""``--emulate W``: run the cases of `bench.collective_matmul` on one real rank, and check the pace of the link."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.emulation.link import TOLERANCE, Link, link_line
from bench.emulation.phantoms import PhantomMemory
from bench.emulation.rank import EmulatedRank, emulated
from bench.harness.case import Case
from bench.harness.exposed import Profiling, exposed_table
from bench.harness.report import bound_ms, case_table, fastest_matmul
from bench.harness.run_case import run_case
from bench.methods.emulated import copied_bytes
from bench.methods.method import Method

_ROUNDS, _COPIES = 7, 16


def run_emulated(
    world: int,
    device: str,
    link: Link,
    cases: Sequence[Case],
    methods: Sequence[Method],
    rounds: int,
    seed: int,
    profiling: Profiling | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run and print all cases. Return their rows and the result of `measure_link`.

    If a case fails, or the user interrupts, no further case is run, since a lane may be broken. The rows of earlier
    cases are returned, and "stopped" in the second result says why.
    """
    rows: list[dict[str, Any]] = []
    titles = {method.name: method.title for method in methods}
    with emulated(world, device, link) as rank:
        reached = measure_link(rank)
        print(f"\nemulated: 1 real rank and {world - 1} phantoms; link {link_line(reached)}", flush=True)
        for case in cases:
            try:
                found = run_case(rank, case, methods, rounds, seed, issue=True, profiling=profiling)
            except (Exception, KeyboardInterrupt) as error:
                traceback.print_exc()
                reached["stopped"] = f"{case}: {type(error).__name__}: {error}"
                break
            for row in found:
                row |= {"emulated": True, "link": link.name, "paced": link.bytes_per_second is not None}
            rows += found
            by_method = {row["method"]: row for row in found}
            print(f"\nemulated, link {link.name}: {case}", case_table(by_method, titles), sep="\n", flush=True)
            print(_bound_line(case, by_method), flush=True)
            if table := exposed_table(by_method, titles):
                print(table, flush=True)
    return rows, reached


def _bound_line(case: Case, by_method: dict[str, dict[str, Any]]) -> str:
    """Add the bound, and the speed of the copies alone, to the rows. Return both as a line of text."""
    compute, copies = fastest_matmul(by_method), by_method.get("copies")
    if compute is None or copies is None:
        return "  no bound: it needs the times of the matmul alone and of the copies alone"
    copies["bytes_per_second"] = copied_bytes(case) / copies["median_ms"] * 1e3
    bound = bound_ms(compute, copies["median_ms"], case.world)
    for row in by_method.values():
        row["bound_ms"] = bound
    return f"  bound {bound:.3f} ms; copies alone at {copies['bytes_per_second'] / 1e9:.3g} GB/s"


def measure_link(rank: EmulatedRank) -> dict[str, Any]:
    """Measure the speed of copies from a phantom and to it, and compare the slower one with the chosen speed."""
    speed = rank.link.bytes_per_second
    nbytes = max(_COPIES, round(speed * rank.pacer.trial)) if speed else 1 << 28
    memory = PhantomMemory(2, nbytes // _COPIES, rank.device, rank.link.on_host)
    source = memory.ranks[1].view(-1, 1)
    target = torch.empty_like(source, device=rank.device)

    def work(from_peer: bool) -> None:
        for _ in range(_COPIES):
            rank.copy(*(target, source) if from_peer else (source, target), from_peer)

    def seconds(from_peer: bool) -> float:
        return statistics.median([rank.pacer.seconds(partial(work, from_peer)) for _ in range(1 + _ROUNDS)][1:])

    reached = _COPIES * source.nbytes / max(seconds(True), seconds(False))
    kept = None if speed is None else abs(reached / speed - 1) <= TOLERANCE
    return {"link": rank.link.name, "bytes_per_second": reached, "asked": speed, "kept": kept}
