"""Format rows as readable tables: for each shape, ratios to the bounds and to the plain collective, also for losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

_KEY = ("op", "m", "n", "k", "dtype", "world", "transposed")


def grouped(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the rows by case and then by method, in their original order."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(key) for key in _KEY), {})[row["method"]] = row
    return cases


def median(case: Mapping[str, Row], method: str) -> float | None:
    """Return the method's time in milliseconds, or None if it was not measured."""
    row = case.get(method)
    return None if row is None else row.get("median_ms")


def baseline(case: Mapping[str, Row]) -> float | None:
    """Return the time of plain collective + matmul, the quicker of its two ways. Emulated runs use "sequential"."""
    return quickest(case, ("plain", "plain_allocating", "sequential"))


def fastest_matmul(case: Mapping[str, Row]) -> float | None:
    """Return the time of the matmul alone: the quicker of torch's and ours, if ours uses another one."""
    return quickest(case, ("matmul", "matmul_of_ours"))


def quickest(case: Mapping[str, Row], methods: Iterable[str]) -> float | None:
    """Return the smallest time among those ``methods`` that were measured, or None."""
    return min((time for name in methods if (time := median(case, name)) is not None), default=None)


def bound_ms(compute: float, copies: float, chunks: int) -> float:
    """Return the time with perfect overlap of `chunks` chunks: the longer of the two plus one chunk of the shorter."""
    return max(compute, copies) + min(compute, copies) / chunks


def case_table(case: Mapping[str, Row], titles: Mapping[str, str]) -> str:
    """Format one shape: a line for every method, with ratios, or the reason if it could not run. Losses are marked."""
    plain, compute, copies = baseline(case), fastest_matmul(case), median(case, "copies")
    world = next(iter(case.values()))["world"]
    issued = any("host_us" in row for row in case.values())
    issue_header = f"{'host us':>10}{'ahead us':>10}{'usual us':>10}{'each ms':>10}" if issued else ""
    lines = [
        f"  {'method':32}{'ms':>10}{'x plain':>10}{'x matmul':>10}{'exposed':>10}{'% bound':>9}{issue_header}  result"
    ]
    for name, row in case.items():
        time = row["median_ms"]
        if time is None:
            lines.append(f"  {titles[name]:32}{'-':>10}  not available: {row['reason']}")
            continue
        over_plain = f"{time / plain:.3f}" if plain else "-"
        over_matmul = f"{time / compute:.3f}" if compute else "-"
        exposed = f"{time - compute:.3f}" if compute else "-"
        of_bound = f"{100 * bound_ms(compute, copies, world) / time:.0f}" if compute and copies else "-"
        if name in ("matmul", "matmul_of_ours", "copies"):
            of_bound = "-"
        loss = "  slower than plain" if name.startswith("ours") and plain and time > plain else ""
        lines.append(
            f"  {titles[name]:32}{time:>10.3f}{over_plain:>10}{over_matmul:>10}{exposed:>10}{of_bound:>9}"
            + (issue_format(row) if issued else "")
            + f"  {checked(row)}{loss}"
        )
    return "\n".join(lines)


def issue_format(row: Row) -> str:
    """Return the columns of `bench.harness.timing.issue_times`."""
    return "".join(f"{row[each]:>10.1f}" for each in ("host_us", "ahead_us", "usual_us")) + f"{row['each_ms']:>10.3f}"


def checked(row: Row) -> str:
    """Return the outcome of the checks in a few words."""
    if "exact" not in row:
        return "not checked"
    if row["ok"]:
        return f"exact, error {row['relative_error']:.1e}"
    return f"WRONG: {row['detail'] or 'error {:.1e} > {:.1e}'.format(row['relative_error'], row['error_bound'])}"


def environment_lines(environment: Mapping[str, object]) -> str:
    return "\n".join(f"  {name:18}{value}" for name, value in environment.items())


def memory_header() -> str:
    return f"  {'M, N, K':22}{'return_A':10}{'gathered':>12}{'growth':>12}{'standing':>12}{'growth/gathered':>17}"


def memory_line(row: Row) -> str:
    """Format the memory of one shape and one way to call the op, in MiB."""
    shape = f"{row['m']}, {row['n']}, {row['k']}"
    sizes = "".join(f"{row[name] / 2**20:>8.1f} MiB" for name in ("gathered_bytes", "growth_bytes", "standing_bytes"))
    return f"  {shape:22}{row['return_A']!s:10}{sizes}{row['growth_bytes'] / row['gathered_bytes']:>17.3f}"
