"""Training text as bytes: where it comes from, and the windows a step reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_text(path: str | None) -> bytes:
    """The bytes of the file at ``path``; None gives the English text of ``pydoc_data.topics`` (about 460 kB).

    Every CPython carries that text, so that a first run needs no download. Raises OSError when the file cannot be read.
    """
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def length_problem(text: bytes, seq: int, path: str | None) -> str | None:
    """One line when ``text`` is too short for a window of ``seq`` bytes and the byte after it, or None."""
    if len(text) > seq:
        return None
    name = "the built-in text" if path is None else f"--text {path}"
    return f"{name} has {len(text)} bytes; --seq {seq} needs at least {seq + 1}: give a longer text or a smaller --seq"


class Windows:
    """Random windows of a text, the same ones on every rank for the same seed.

    Each :meth:`next` returns int64 bytes of shape (seq + 1, batch): inputs are all but the last row, targets all but
    the first. The sequence comes first because it is the dimension that ranks share out, and gathering the first
    dimension moves contiguous memory.
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
