"""What is exposed in the calls of a method: recorded by torch's profiler, outside of all timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.launch import Rank
from bench.harness.report import Row
from bench.harness.timing import Timed, timer_of
from symm_overlap.profile import Exposure, kinds_of_calls, record
from symm_overlap.profile.report import LEGEND, figures, header

_CALLS = 5


def exposures(
    rank: Rank, methods: Mapping[str, Timed], folder: Path | None, title: str
) -> dict[str, dict[str, float | None]]:
    """Record calls of every method on this rank. Return the median of each figure of `Exposure`.

    A method is left out if no step of a call was recorded: it makes no calls of this package, or its calls go through
    torch.distributed on a CPU.

    Args:
        folder: where to write a trace of each method, if given.
        title: the beginning of their names.
    """
    timer = timer_of(rank)  # with a full cache and a busy GPU in front of each call, as when calls are timed
    found = {}
    for name, method in methods.items():
        trace = None if folder is None else folder / f"{title}_{name}_rank{rank.rank}.json"
        with method.around():
            timer.time(method.call)
            with record(trace) as recorded:
                for _ in range(_CALLS):
                    timer.time(method.call)
        kinds = [kind for recording in recorded.recordings for kind in kinds_of_calls(recording)]
        if kinds:
            found[name] = kinds[0].median.as_dict()
    return found


def exposed_table(case: Mapping[str, Row], titles: Mapping[str, str]) -> str:
    """Format what was exposed in the calls of each method, on rank 0."""
    lines = [f"  {'exposed, ms, while a profiler records':38}{header()}"]
    for name, row in case.items():
        spent: dict[str, Any] | None = row.get("exposure_ms")
        if spent:
            given = {field.name: spent[field.name] for field in dataclasses.fields(Exposure)}
            lines.append(f"  {titles[name]:38}{figures(Exposure(**given))}")
    return "\n".join(lines)


__all__ = ["LEGEND", "exposed_table", "exposures"]
