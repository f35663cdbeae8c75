"""Compile kernels and parse PTX: find the instructions of each kernel, and which of them are in a loop."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]

LABEL = re.compile(r"^(\$\w+):")
BRANCH = re.compile(r"^(@!?%p\d+ )?bra(\.uni)?\s+(\$\w+)")


def compiled(source: str, *arguments: str) -> str:
    """Compile a file of kernels with nvcc, and return what nvcc reports."""
    from torch.utils.cpp_extension import CUDA_HOME

    command = [f"{CUDA_HOME}/bin/nvcc", "-std=c++17", "-O3", "-Icsrc", *arguments, source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def kernels(ptx: str) -> dict[str, list[str]]:
    """Return the lines (instructions and labels) of each kernel, by its mangled name."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in map(str.strip, ptx.splitlines()):
        if start := re.match(r"(?:\.visible )?\.entry (\w+)\(", line):
            lines = found[start[1]] = []
        elif line == "}" and lines is not None:
            lines = None
        elif lines is not None and line and not line.startswith((".", "//", "{", ")")):
            lines.append(line)
    return found


def loops(lines: list[str]) -> list[list[str]]:
    """Return the instructions of each outermost loop. An instruction is in a loop if control can return to it."""
    labels = {match[1]: index for index, line in enumerate(lines) if (match := LABEL.match(line))}
    follows = [list(_next(lines, labels, index)) for index in range(len(lines))]
    reached = [_reachable(follows, index) for index in range(len(lines))]
    parts: dict[frozenset[int], list[str]] = {}
    for index, line in enumerate(lines):
        if index in reached[index] and not LABEL.match(line):
            part = frozenset(other for other in reached[index] if index in reached[other])
            parts.setdefault(part, []).append(line)
    return list(parts.values())


def _next(lines: list[str], labels: dict[str, int], index: int) -> Iterable[int]:
    """Yield the indices of the lines that may run directly after the line ``index``."""
    branch = BRANCH.match(lines[index])
    if branch:
        yield labels[branch[3]]
    ends = re.match(r"(ret|exit|trap)\b", lines[index]) or (branch and not branch[1])
    if not ends and index + 1 < len(lines):
        yield index + 1


def _reachable(follows: list[list[int]], start: int) -> set[int]:
    """Return the indices of all lines that may run at some time after the line ``start``."""
    found: set[int] = set()
    left = list(follows[start])
    while left:
        if (index := left.pop()) not in found:
            found.add(index)
            left += follows[index]
    return found


def innermost_loop(lines: list[str], mark: str) -> list[int]:
    """Return the line indices of the smallest loop that contains an instruction with ``mark``.

    The search removes the first line of the loop found so far. Then only the loops inside it remain.
    """
    labels = {match[1]: index for index, line in enumerate(lines) if (match := LABEL.match(line))}
    follows = [list(_next(lines, labels, index)) for index in range(len(lines))]
    at = next(index for index, line in enumerate(lines) if mark in line)
    found, left = list[int](), set(range(len(lines)))
    while at in left:
        inside = [[other for other in follows[index] if other in left] for index in range(len(lines))]
        reached = {index: _reachable(inside, index) for index in left}
        if at not in reached[at]:
            break
        found = sorted(index for index in left if index in reached[at] and at in reached[index])
        first = {other for index in set(range(len(lines))) - set(found) for other in follows[index]}
        left = set(found) - first
    return found


def behind_exits(lines: list[str], loop: list[int]) -> list[str]:
    """Return, for each exit of a loop, the first line after it that accesses memory, if no branch comes earlier."""
    labels = {match[1]: index for index, line in enumerate(lines) if (match := LABEL.match(line))}
    found = []
    for index in loop:
        for way in _next(lines, labels, index):
            at, ways = way, [way]
            if way in loop:
                continue
            while len(ways) == 1 and not re.match(r"(ld|st|atom|red)\.", lines[at]):
                ways = list(_next(lines, labels, at))
                at = ways[0] if ways else at
            found.append(lines[at])
    return found
