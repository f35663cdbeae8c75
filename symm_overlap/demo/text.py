"""The training text as bytes: its source, and the windows that a step reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_text(path: str | None) -> bytes:
    """Return the bytes of the file at ``path``, or for None the English text of ``pydoc_data.topics`` (about 460 kB).

    Every CPython includes that text, so a first run needs no download. Raises OSError if the file cannot be read.
    """
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def length_problem(text: bytes, seq: int, path: str | None) -> str | None:
    """Return one line if ``text`` is too short for a window of ``seq`` bytes and the byte after it, otherwise None."""
    if len(text) > seq:
        return None
    name = "the built-in text" if path is None else f"--text {path}"
    return f"{name} has {len(text)} bytes; --seq {seq} needs at least {seq + 1}: give a longer text or a smaller --seq"


class Windows:
    """Random windows of a text. The same seed gives the same windows on every rank.

    Each call of :meth:`next` returns bytes as int64 of shape (seq + 1, batch). The inputs are all rows but the last,
    and the targets are all rows but the first. The sequence is the first dimension because it is split over ranks, and
    gathering along the first dimension moves contiguous memory.
    """

    def __init__(self, text: bytes, seq: int, batch: int, seed: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._offsets = torch.arange(seq + 1).unsqueeze(1)
        self._batch = batch
        self._last_start = len(text) - seq - 1
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        starts = torch.randint(self._last_start + 1, (1, self._batch), generator=self._generator)
        return self._bytes[self._offsets + starts].long()
