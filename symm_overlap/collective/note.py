"""What travels with an op in a compiled graph: the settings it was compiled with, and what the graph's maker wants to
read in a graph that comes from a cache. It is one string, since that is what a graph can hold.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from ..settings import Settings

_SETTINGS = ("path", "chunks", "streams", "timeout", "lane")


def make_note(settings: Settings, memo: Any = None) -> str:
    """A note with these settings and anything else that JSON can hold. It is empty where there is nothing to say."""
    given = {name: value for name, value in asdict(settings).items() if name in _SETTINGS and value is not None}
    if not given and memo is None:
        return ""
    return json.dumps({"settings": given, "memo": memo}, separators=(",", ":"))


@lru_cache(maxsize=4096)
def settings_in(note: str) -> Settings:
    """The settings of a note."""
    return Settings(**json.loads(note)["settings"]) if note else Settings()


def memo_in(note: str) -> Any:
    """What else a note holds; None where there is nothing."""
    return json.loads(note)["memo"] if note else None
