"""``symm-overlap profile``: read traces of profilers, and show what is hidden and what is still exposed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..profile import Recording, exposure, kinds_of_calls, page, read, report
from ..profile.report import NOTHING
from .mistakes import report_errors, require_distinct, write_file


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "profile", help="show what traces of profilers say about hidden and exposed communication", description=__doc__
    )
    add = parser.add_argument
    traces = "a trace that torch.profiler has exported (.json, .json.gz), or an export of Nsight Systems (.sqlite)"
    add("traces", nargs="+", type=Path, metavar="TRACE", help=f"{traces}; give those of all ranks, or some")
    add("--steps", action="store_true", help="compare the steps of each kind of call with the cost model's prediction")
    add("--html", type=Path, metavar="FILE", help="write a page with the report and timelines of the calls")
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON")


@report_errors("profile")
def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 for success, 2 for files that are not traces."""
    require_distinct(html=args.html, json=args.json)
    for trace in args.traces:
        require_distinct(trace=trace, html=args.html, json=args.json)
    recordings: list[Recording] = []
    for path in args.traces:
        found = read(path)
        if not found:
            raise ValueError(f"{path}: {NOTHING}")
        recordings += found
    print(report(recordings, steps=args.steps))
    if args.html:
        write_file(args.html, page(recordings))
    if args.json:
        write_file(args.json, json.dumps([_figures(each) for each in recordings], indent=1, allow_nan=False) + "\n")
    return 0


def _figures(recording: Recording) -> dict[str, Any]:
    return {
        "source": recording.source,
        "rank": recording.rank,
        "process": recording.process,
        "device": recording.device,
        "all": None if recording.on_cpu else exposure(recording.activities).as_dict(),
        "calls": [
            {"call": each.call.name, "count": each.count, "median_ms": each.median.as_dict()}
            for each in kinds_of_calls(recording)
        ],
    }
