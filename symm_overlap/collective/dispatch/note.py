"""The settings with which an op was compiled, stored with the op in a compiled graph. They are encoded as one string,
because a graph can hold strings.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

from ...settings import Settings

_SETTINGS = ("path", "chunks", "streams", "span", "timeout", "lane")


def make_note(settings: Settings) -> str:
    """Return a note with these settings. It is empty if none is set."""
    given = {name: value for name, value in asdict(settings).items() if name in _SETTINGS and value is not None}
    return json.dumps(given, separators=(",", ":")) if given else ""


@lru_cache(maxsize=4096)
def settings_in(note: str) -> Settings:
    """Return the settings in a note."""
    return Settings(**json.loads(note)) if note else Settings()
