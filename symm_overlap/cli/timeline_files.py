"""The options ``--svg`` and ``--trace`` of commands that simulate: the files to write the timeline to."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from .mistakes import write_file


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the two options."""
    add = parser.add_argument
    add("--svg", type=Path, metavar="FILE", help="write the simulated timeline as an SVG image")
    add("--trace", type=Path, metavar="FILE", help="write the simulated timeline as a Chrome trace for Perfetto")


def write_files(args: argparse.Namespace, svg: Callable[[], str], trace: Callable[[], object]) -> None:
    """Write the files that were asked for.

    Args:
        svg: draws the timeline.
        trace: returns the timeline as events, to be written as JSON.

    Raises:
        OSError: a file cannot be written.
    """
    if args.svg:
        write_file(args.svg, svg())
    if args.trace:
        write_file(args.trace, json.dumps(trace()))
