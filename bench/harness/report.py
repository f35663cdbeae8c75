"""Rows to a table a person reads: ratios to the bounds and to the plain collective for each shape, losses included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

_KEY = ("op", "m", "n", "k", "dtype", "world", "transposed")


def grouped(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by case, then by method, in the order they came."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(key) for key in _KEY), {})[row["method"]] = row
    return cases


def median(case: Mapping[str, Row], method: str) -> float | None:
    """The method's time in milliseconds, or None where it was not measured."""
    row = case.get(method)
    return None if row is None else row.get("median_ms")


def baseline(case: Mapping[str, Row]) -> float | None:
    """Plain collective + matmul: the quicker of the two ways to call it, or what stands for it where there is none."""
    return quickest(case, ("plain", "plain_allocating", "sequential"))


def fastest_matmul(case: Mapping[str, Row]) -> float | None:
    """The matmul alone: torch's or, where it is another, that of ours."""
    return quickest(case, ("matmul", "matmul_of_ours"))


def quickest(case: Mapping[str, Row], methods: Iterable[str]) -> float | None:
    """The least of the times of ``methods`` that were measured."""
    return min((time for name in methods if (time := median(case, name)) is not None), default=None)


def bound_ms(compute: float, copies: float, chunks: int) -> float:
    """What perfect overlap of `chunks` chunks leaves: the longer of the two, and one chunk of the shorter."""
    return max(compute, copies) + min(compute, copies) / chunks


def efficiency(compute: float, communication: float, overlapped: float) -> float:
    """1 when all communication (or all compute) is hidden, 0 when none is, below 0 when worse than none."""
    return (compute + communication - overlapped) / min(compute, communication)


def case_table(case: Mapping[str, Row], titles: Mapping[str, str]) -> str:
    """One shape: a line for every method, with ratios; what could not run says why, and a loss is marked ``slower``."""
    plain, compute, copies = baseline(case), fastest_matmul(case), median(case, "copies")
    world = next(iter(case.values()))["world"]
    issued = any("host_us" in row for row in case.values())
    issue_header = f"{'host us':>10}{'each ms':>10}" if issued else ""
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
            + (f"{row['host_us']:>10.1f}{row['each_ms']:>10.3f}" if issued else "")
            + f"  {checked(row)}{loss}"
        )
    return "\n".join(lines)


def checked(row: Row) -> str:
    """What the checks said, in a few words."""
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
    """One shape and one way to call it, sizes in MiB."""
    shape = f"{row['m']}, {row['n']}, {row['k']}"
    sizes = "".join(f"{row[name] / 2**20:>8.1f} MiB" for name in ("gathered_bytes", "growth_bytes", "standing_bytes"))
    return f"  {shape:22}{row['return_A']!s:10}{sizes}{row['growth_bytes'] / row['gathered_bytes']:>17.3f}"
