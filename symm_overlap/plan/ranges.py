"""The names of steps in the traces of profilers: written while a plan runs, and read by `symm_overlap.profile`."""

from __future__ import annotations

import re

from .step import Step

PREFIX = "symm_overlap step: "

_STEP = re.compile(
    r"(?P<kind>\S+)"
    r"(?: chunk (?P<owner>\d+)\.(?P<piece>\d+))?"
    r"(?: (?:to|for) ranks? (?P<peers>\d+(?:, \d+)*))?"
    r"(?: channel (?P<channel>\d+))?"
    r"(?: (?P<label>.+))?"
    r" on (?P<stream>\S+)"
)


def range_of(step: Step) -> str:
    """Return the name of a step's range in a trace."""
    return f"{PREFIX}{step}"


def step_of(name: str) -> Step | None:
    """Return the step that a range is named after, without its memory; None if the range is not a step's."""
    found = _STEP.fullmatch(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if found is None:
        return None
    owner, piece, peers, channel = found.group("owner", "piece", "peers", "channel")
    return Step(
        found["kind"],
        found["stream"],
        peers=tuple(map(int, peers.split(", "))) if peers else (),
        channel=None if channel is None else int(channel),
        chunk=None if owner is None else (int(owner), int(piece)),
        label=found["label"] or "",
    )
