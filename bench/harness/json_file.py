"""The option ``--json`` of the benchmarks."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path


def add_json_option(parser: ArgumentParser) -> None:
    """Add the option ``--json FILE``."""
    parser.add_argument("--json", metavar="FILE", help="write the environment and the results")


def write_json(file: str | None, environment: Mapping[str, object], **results: object) -> None:
    """Write the environment and the results to a file, if one is named."""
    if file:
        Path(file).write_text(json.dumps({"environment": environment, **results}, indent=1) + "\n")
