"""What is exposed in the calls of a method: recorded by a profiler, outside of all timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.autograd.profiler import emit_nvtx

from bench.harness.launch import Rank
from bench.harness.report import Row
from bench.harness.timing import Timed, timer_of
from symm_overlap.profile import Exposure, kinds_of_calls, record
from symm_overlap.profile.report import figures, header

_CALLS = 5


@dataclasses.dataclass(frozen=True)
class Profiling:
    """How calls are recorded.

    Attributes:
        traces: the folder to which torch's profiler writes a trace of each method, if any.
        nvtx: whether Nsight Systems records the whole program instead. The calls then only get their ranges.
    """

    traces: Path | None = None
    nvtx: bool = False


def exposures(
    rank: Rank, methods: Mapping[str, Timed], how: Profiling, title: str
) -> dict[str, dict[str, float | None]]:
    """Record calls of every method on this rank. Return the median of each figure of `Exposure`.

    A method is left out if no step of a call was recorded: it makes no calls of this package, its calls go through
    torch.distributed on a CPU, or Nsight Systems records them.

    Args:
        title: the beginning of the names of the traces.
    """
    timer = timer_of(rank)  # with a full cache and a busy GPU in front of each call, as when calls are timed
    found = {}
    for name, method in methods.items():
        with method.around():
            timer.time(method.call)
            if how.nvtx:
                with emit_nvtx():
                    _repeat(timer.time, method)
                continue
            trace = None if how.traces is None else how.traces / f"{title}_{name}_rank{rank.rank}.json"
            with record(trace) as recorded:
                _repeat(timer.time, method)
        kinds = [kind for recording in recorded.recordings for kind in kinds_of_calls(recording)]
        if kinds:
            found[name] = kinds[0].median.as_dict()
    return found


def _repeat(run: Any, method: Timed) -> None:
    for _ in range(_CALLS):
        run(method.call)


def exposed_table(case: Mapping[str, Row], titles: Mapping[str, str]) -> str:
    """Format what was exposed in the calls of each method, on rank 0. The text is empty if nothing was recorded."""
    lines = []
    for name, row in case.items():
        spent: dict[str, Any] | None = row.get("exposure_ms")
        if spent:
            given = {field.name: spent[field.name] for field in dataclasses.fields(Exposure)}
            lines.append(f"  {titles[name]:38}{figures(Exposure(**given))}")
    return "\n".join([f"  {'exposed, ms, while a profiler records':38}{header()}", *lines]) if lines else ""
