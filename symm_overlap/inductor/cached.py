"""Graphs that come from torch's caches. The pass does not run for them, but the report of a graph travels in it, in the
note of its first fused op, and is read from the graph's code here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch.fx import Graph

from ..collective.note import memo_in
from ._torch import loaded_files
from .report import GraphReport, Report, Site, record, recorded

_NOTE = re.compile(r"""note=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")

_read: set[str] = set()  # files that have been looked into
_here: set[str] = set()  # graphs whose reports are known


def report() -> Report:
    """What was fused so far, and why not where it was not. A graph from a cache is in it from the moment on when this
    process has loaded it first, unless nothing in it was fused.
    """
    find_cached()
    return recorded()


def memo_of(report: GraphReport, graph: Graph) -> dict[str, Any]:
    """What travels in a graph that the pass has changed."""
    name = sha256(f"{report.memo} {graph}".encode()).hexdigest()[:16]
    _here.add(name)
    return {"graph": name, "sites": report.memo}


def find_cached(_: Any = None) -> None:
    """Add graphs that have been taken from a cache since the last call to the report."""
    for file in loaded_files():
        if file in _read:
            continue
        _read.add(file)
        for memo in _memos(Path(file)):
            if memo["graph"] not in _here:
                _here.add(memo["graph"])
                record(GraphReport(tuple(Site(**site) for site in memo["sites"]), cached=True))


def _memos(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text()
    except OSError:  # the cache has been cleared since
        return
    for found in _NOTE.finditer(text):
        memo = memo_in(ast.literal_eval(found[1]))
        if memo is not None:
            yield memo
