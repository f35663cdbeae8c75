"""The names of calls and steps in the traces of profilers: written while they run, and read by `symm_overlap.profile`.

The range of a call has a text for people, and facts: ``key=value`` pairs without spaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from .step import Step

STEP, CALL = "symm_overlap step: ", "symm_overlap call: "
"""How the names of ranges of steps, and of ranges of calls, begin."""

_STEP = re.compile(
    r"(?P<kind>\S+)"
    r"(?: chunk (?P<owner>\d+)\.(?P<piece>\d+))?"
    r"(?: (?:to|for) ranks? (?P<peers>\d+(?:, \d+)*))?"
    r"(?: channel (?P<channel>\d+))?"
    r"(?: (?P<label>.+))?"
    r" on (?P<stream>\S+)"
)


def range_of(step: Step) -> str:
    """Return the name of a step's range."""
    return f"{STEP}{step}"


@lru_cache(maxsize=1 << 14)
def step_of(name: str) -> Step | None:
    """Return the step that a range is named after, without its memory; None if the range is not a step's."""
    found = _STEP.fullmatch(name.removeprefix(STEP)) if name.startswith(STEP) else None
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


def range_of_call(text: str, device: str, rank: int, world: int, **facts: object) -> str:
    """Return the name of a call's range.

    Args:
        text: the call in words.
        device: the kind of device.
        facts: whatever else a reader needs.
    """
    every = {"device": device, "rank": rank, "world": world, **facts}
    return f"{CALL}{text}; " + " ".join(f"{key}={value}" for key, value in every.items())


@lru_cache(maxsize=1 << 14)
def call_of(name: str) -> tuple[str, Mapping[str, str]] | None:
    """Return the text and the facts of the call that a range is named after; None if the range is not a call's."""
    text, separator, facts = name.rpartition("; ")
    if not separator or not text.startswith(CALL):
        return None
    pairs = (fact.partition("=") for fact in facts.split(" "))
    return text.removeprefix(CALL), MappingProxyType({key: value for key, _, value in pairs})
