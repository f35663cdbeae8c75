"""The targets for CPU, world size 2, one thread a rank and the ``cpu`` shapes, each with its figure and verdict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean

from bench.harness.report import Row, grouped, median, quickest

PLAIN_WORST = 1.02  # ours / (plain collective + matmul), on every shape
PLAIN_MEAN = 0.80  # the same ratio, geometric mean over shapes
MATMUL_WORST = 1.15  # ours / matmul alone, on shapes with enough rows
MATMUL_ROWS = 512  # smallest number of rows a rank for which MATMUL_WORST applies
MEMORY_SHARE = 0.1  # growth of memory in a call with return_A=False / gathered size

# Ours is compared with the plain collective and torch's matmul, which programs use today. If ours uses another matmul,
# it is also compared with the plain collective and that matmul, so that only communication differs.
BASES: dict[str, tuple[tuple[str, ...], str]] = {
    "torch's matmul": (("plain", "plain_allocating"), "matmul"),
    "the same matmul": (("plain_of_ours", "plain_allocating_of_ours"), "matmul_of_ours"),
}

# The groups that are judged together, each with one method for each op. An all-gather-matmul that also returns the
# gathered tensor has more to write, so both ways to call it are judged.
GROUPS: dict[str, dict[str, str]] = {
    "AG and RS, return_A=True": {"all_gather_matmul": "ours", "matmul_reduce_scatter": "ours"},
    "AG and RS, return_A=False": {"all_gather_matmul": "ours_no_gathered", "matmul_reduce_scatter": "ours"},
    "AR": {"matmul_all_reduce": "ours"},
}


@dataclass(frozen=True)
class Verdict:
    """A target, the figure that was reached, and the case in which it was reached."""

    target: str
    limit: float
    figure: float
    where: str

    @property
    def met(self) -> bool:
        return self.figure <= self.limit

    def __str__(self) -> str:
        word = "met" if self.met else "MISSED"
        return f"  {word:8}{self.target:76}<= {self.limit:.2f}: {self.figure:6.3f}  {self.where}"

    def as_dict(self) -> dict[str, object]:
        return {
            "target": self.target, "limit": self.limit, "figure": self.figure, "where": self.where, "met": self.met
        }  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    ours: float
    plain: float | None
    matmul: float | None
    rows_per_rank: int
    where: str


@dataclass(frozen=True)
class Means:
    """Geometric means over the cases of a group.

    For an op that calls the same matmul, ``ours_over_plain`` cannot be less than ``matmul_over_plain``.
    """

    group: str
    base: str
    cases: int
    matmul_over_plain: float
    ours_over_plain: float
    ours_over_matmul: float

    def __str__(self) -> str:
        ratios = f"{self.matmul_over_plain:.3f}, ours / plain {self.ours_over_plain:.3f}, ours / matmul"
        over = f"geometric means over {self.cases} cases: matmul / plain"
        return f"  {self.group}, {self.base}, {over} {ratios} {self.ours_over_matmul:.3f}"


def means(rows: Iterable[Row]) -> list[Means]:
    """Return the means of every group for which the matmul alone, plain and ours were measured."""
    cases = list(grouped(rows).values())
    found: list[Means] = []
    for group, base in itertools.product(GROUPS, BASES):
        measured = [one for case in cases if (one := _measured(case, group, base)) is not None]
        whole = [(one.ours, one.plain, one.matmul) for one in measured if one.plain and one.matmul]
        if whole:
            ours, plain, matmul = (geometric_mean(times) for times in zip(*whole, strict=True))
            found.append(Means(group, base, len(whole), matmul / plain, ours / plain, ours / matmul))
    return found


def speed_verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Return a verdict for every target that can be judged from these rows."""
    cases = list(grouped(rows).values())
    found: list[Verdict] = []
    for group, base in itertools.product(GROUPS, BASES):
        measured = [one for case in cases if (one := _measured(case, group, base)) is not None]
        name = f"{group}, {base}"
        over_plain = [(one.ours / one.plain, one.where) for one in measured if one.plain]
        over_matmul = [
            (one.ours / one.matmul, one.where) for one in measured if one.matmul and one.rows_per_rank >= MATMUL_ROWS
        ]
        if over_plain:
            mean = geometric_mean([ratio for ratio, _ in over_plain])
            found.append(Verdict(f"{name}: ours / plain, worst", PLAIN_WORST, *max(over_plain)))
            found.append(
                Verdict(f"{name}: ours / plain, geometric mean", PLAIN_MEAN, mean, f"over {len(over_plain)} cases")
            )
        if over_matmul:
            found.append(
                Verdict(f"{name}: ours / matmul, worst at >= {MATMUL_ROWS} rows", MATMUL_WORST, *max(over_matmul))
            )
    return found


def memory_verdicts(memory: Iterable[Row]) -> list[Verdict]:
    """Judge the growth of memory with return_A=False, on the shape with the largest growth / gathered size."""
    shares = [(row["growth_bytes"] / row["gathered_bytes"], _where(row)) for row in memory if not row["return_A"]]
    return [Verdict("return_A=False: memory growth / gathered size", MEMORY_SHARE, *max(shares))] if shares else []


def _measured(case: Mapping[str, Row], group: str, base: str) -> _Measured | None:
    row = next(iter(case.values()))
    ours = median(case, GROUPS[group].get(row["op"], ""))
    if ours is None:
        return None
    plain, matmul = BASES[base]
    return _Measured(ours, quickest(case, plain), median(case, matmul), row["m"] // row["world"], _where(row))


def _where(row: Row) -> str:
    return f"at {row['op']} M {row['m']} N {row['n']} K {row['k']}"
