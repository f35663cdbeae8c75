"""The user's choices for the pass."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from ..blocks import force_path, lane, timeout
from ..settings import Settings, applied, current


@dataclass(frozen=True)
class Choices:
    """The user's choices for the pass; see `symm_overlap.inductor.options`.

    Attributes:
        settings: the settings of the ops in compiled graphs. A block around the call overrides them.
    """

    strict: bool = False
    small: bool = False
    merge_sums: bool = True
    settings: Settings = field(default_factory=Settings)


def checked_settings(
    path: str | None,
    chunks: int | None,
    streams: int | None,
    span: int | None,
    seconds: float | None,
    index: int | None,
) -> Settings:
    """Return the settings that blocks with these arguments would set.

    Raises:
        ValueError, TypeError: as the blocks do.
    """
    with applied(Settings()), ExitStack() as blocks:
        if (path, chunks, streams, span) != (None, None, None, None):
            blocks.enter_context(force_path(path, chunks=chunks, streams=streams, span=span))
        if seconds is not None:
            blocks.enter_context(timeout(seconds))
        if index is not None:
            blocks.enter_context(lane(index))
        return current()
