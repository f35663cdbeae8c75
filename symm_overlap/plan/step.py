"""Regions and steps: a step is one action of one stream of one rank, and its regions are the memory it touches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .kinds import find


class Region(NamedTuple):
    """Units ``start`` to ``stop`` (half open) of ``buffer`` in the memory of ``rank``.

    The planner decides what a unit is: a chunk of a collective matmul, a layer's weights, a microbatch's activations.
    """

    buffer: str
    rank: int
    start: int
    stop: int

    def __str__(self) -> str:
        units = str(self.start) if self.stop == self.start + 1 else f"{self.start}:{self.stop}"
        return f"{self.buffer}@{self.rank}[{units}]"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one stream of one rank.

    Attributes:
        kind: the name of a registered `Kind`.
        stream: the stream that runs it.
        reads, writes: the memory that the step reads and writes. It touches no other memory.
        after: indices of earlier steps of the same plan, on other streams, that must be done before this step starts.
        peers: the other ranks that the step synchronises with or copies from or to. A signal or wait may have several
            peers, in the order in which they are signalled or expected. A step that moves data has one.
        channel: separates the independent signals between one pair of ranks: each channel counts its own signals.
        chunk: (rank that the chunk is for or comes from, piece of that rank's part). For a step with several peers:
            this rank and the piece. None for a step that works on all the units it writes.
        label: a wait and the signal it pairs with carry the same label. The label of a barrier says what it protects.
    """

    kind: str
    stream: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    after: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    channel: int | None = None
    chunk: tuple[int, int] | None = None
    label: str = ""

    @property
    def peer(self) -> int:
        """The peer of a step that has exactly one, such as a send. Raises ValueError for any other step."""
        (peer,) = self.peers
        return peer

    def chunk_name(self, pieces: bool = True) -> str:
        """Return the chunk in words: "1.0", or "1" without ``pieces``. A step that writes several units: "1-3.0"."""
        assert self.chunk is not None
        (owner, piece), count = self.chunk, max((region.stop - region.start for region in self.writes), default=1)
        where = str(owner) if count <= 1 else f"{owner}-{owner + count - 1}"
        return f"{where}.{piece}" if pieces else where

    def __str__(self) -> str:
        words = [self.kind]
        if self.chunk is not None:
            words.append(f"chunk {self.chunk[0]}.{self.chunk[1]}")
        record = find(self.kind)
        if record is not None and record.meets in ("posts", "awaits"):
            ranks = f"rank{'s' * (len(self.peers) != 1)} {', '.join(map(str, self.peers))}"
            words.append(f"{'to' if record.meets == 'posts' else 'for'} {ranks}")
        if self.channel is not None:
            words.append(f"channel {self.channel}")
        if self.label:
            words.append(self.label)
        return " ".join(words) + f" on {self.stream}"
