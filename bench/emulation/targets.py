"""The targets of emulated runs with 8 ranks, an H100 or H200, and a link of 369GB/s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from bench.harness.report import Row, bound_ms, fastest_matmul, grouped, median
from bench.harness.targets import Verdict

LINK = "369GB/s"  # the link to which all targets but those of the host apply
BOUND_WORST = 1.08  # ours / bound
PUBLISHED_MEAN = 1 / 1.15  # ours / torch's published plan, geometric mean
SEQUENTIAL_WORST = 1.02  # ours / copies followed by the matmul
HOST_US = {"ours_kernel_waits": 80.0, "ours_memory_waits": 80.0, "ours_fused": 40.0}


def emulated_verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Return a verdict for every target that can be judged from these rows."""
    rows = list(rows)
    over: dict[str, list[tuple[float, str]]] = {"bound": [], "published": [], "sequential": []}
    for case in grouped(rows).values():
        ours, compute, copies = median(case, "ours"), fastest_matmul(case), median(case, "copies")
        row = next(iter(case.values()))
        if ours is None or row["link"] != LINK:
            continue
        where = f"{row['op']} {row['m']}, {row['n']}, {row['k']}"
        if compute and copies:
            over["bound"].append((ours / bound_ms(compute, copies, row["world"]), where))
        for base in ("published", "sequential"):
            if time := median(case, base):
                over[base].append((ours / time, where))
    found = []
    if over["bound"]:
        found.append(Verdict("emulated: ours over the bound", BOUND_WORST, *max(over["bound"])))
    if over["published"]:
        mean = geometric_mean(ratio for ratio, _ in over["published"])
        where = f"{len(over['published'])} cases"
        found.append(Verdict("emulated: ours over torch's published plan, mean", PUBLISHED_MEAN, mean, where))
    if over["sequential"]:
        found.append(Verdict("emulated: ours over sequential", SEQUENTIAL_WORST, *max(over["sequential"])))
    return found + _host_verdicts(rows)


def _host_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Judge the host's time for a call, for links without a pace: the launches that pace a link would add to it."""
    found = []
    for method, limit in HOST_US.items():
        times = [(row["host_us"], f"{row['op']} {row['m']}, {row['n']}, {row['k']}") for row in rows
                 if row["method"] == method and "host_us" in row and not row["paced"]]  # fmt: skip
        if times:
            found.append(Verdict(f"emulated: {method}, microseconds of the host a call", limit, *max(times)))
    return found
