"""What travels with an op in a compiled graph: the settings it was compiled with. They are one string, since that is
what a graph can hold.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

from ..settings import Settings

_SETTINGS = ("path", "chunks", "streams", "timeout", "lane")


def make_note(settings: Settings) -> str:
    """A note with these settings. It is empty where there are none."""
    given = {name: value for name, value in asdict(settings).items() if name in _SETTINGS and value is not None}
    return json.dumps(given, separators=(",", ":")) if given else ""


@lru_cache(maxsize=4096)
def settings_in(note: str) -> Settings:
    """The settings of a note."""
    return Settings(**json.loads(note)) if note else Settings()
