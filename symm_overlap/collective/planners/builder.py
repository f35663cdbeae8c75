"""The part that all planners of collective matmul share: chunks, compute streams, copy streams, and the ring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from ...plan import Builder, Life, Region
from .kinds import PULL

_Key = TypeVar("_Key")


def grouped(keys: Mapping[int, _Key]) -> list[tuple[_Key, list[int]]]:
    """Group peers by channel or by stream: ``{peer: key}`` becomes a list of (key, its peers), one for each step."""
    groups: dict[_Key, list[int]] = {}
    for peer, key in keys.items():
        groups.setdefault(key, []).append(peer)
    return list(groups.items())


def span_sizes(count: int, most: int) -> list[int]:
    """Return how many of ``count`` parts each matmul covers, at most ``most``, in the order of arrival.

    There are as few matmuls as possible. They are as equal as possible, and the smaller ones come first.
    """
    matmuls = -(-count // most)
    return [(count + turn) // matmuls for turn in range(matmuls)]


class CollectiveBuilder(Builder):
    """A `Builder` for plans in which each rank's part is cut into chunks, or in which matmuls span several parts.

    Args:
        op, rank, world, buffers, inputs: see `Builder`.
        chunks: the number of pieces into which each rank's part is cut.
        compute: one or two streams that compute; the first is the caller's.
        copy: the stream of the copies. If it is ``compute[0]``, the copies are on the caller's stream.
        copies: the number of streams of the copies, 1 or 2. Two streams take turns, a peer each: while one copies, the
            other already waits for the next peer, so that the link is not idle from one copy to the next. The second
            stream is ``copy`` followed by a 1.
        span: how many peers' parts one matmul covers at most; see `span_sizes`. Fewer matmuls, of more rows, lose less
            time at their ends. With more than 1, parts are not cut into chunks.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        world: int,
        chunks: int,
        compute: tuple[str, ...],
        copy: str,
        *,
        buffers: Mapping[str, Life],
        inputs: int,
        copies: int = 1,
        span: int = 1,
    ) -> None:
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}: a rank's part must be cut into at least 1 chunk")
        if span < 1 or (span > 1 and chunks > 1):
            raise ValueError(
                f"span is {span} and chunks is {chunks}: a matmul covers at least 1 part, and 1 if parts are cut"
            )
        if len(compute) not in (1, 2) or len(set(compute)) != len(compute):
            raise ValueError(f"compute is {compute}: name one compute stream, or two different ones")
        if copy in compute[1:]:
            raise ValueError(f"copy is {copy!r}, the second compute stream: use another name, or {compute[0]!r}")
        self.merged = copy == compute[0]
        if copies not in (1, 2) or (self.merged and copies == 2):
            raise ValueError(f"copies is {copies}: there are 1 or 2 copy streams, and 1 if it is the caller's")
        if copies == 2 and f"{copy}1" in compute:
            raise ValueError(f"{copy}1 is the name of a compute stream and of the second copy stream: use another name")
        self.chunks, self.compute, self.copy, self.span = chunks, compute, copy, span
        self._copy_streams = (copy, f"{copy}1")[:copies]
        self._turns: dict[int, str] = {}
        self._first: dict[str, int] = {}  # for each copy stream, its first copy
        self._latest: dict[str, int] = {}
        super().__init__(op, rank, world, stream=compute[0], buffers=buffers, inputs={"input": inputs})

    @property
    def pieces(self) -> range:
        """The indices of the pieces into which a rank's part is cut."""
        return range(self.chunks)

    @property
    def peers(self) -> list[int]:
        """The other ranks, in the order in which this rank fetches from them.

        In reverse, it is the order in which they fetch from this rank.
        """
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def unit(self, owner: int, piece: int) -> int:
        """Return the unit of a chunk in a buffer that holds the chunks of all ranks."""
        return owner * self.chunks + piece

    def spans(self, shrinking: bool = False) -> list[list[tuple[int, int]]]:
        """Return the chunks of the peers that are multiplied together, in the order in which this rank fetches them.

        Args:
            shrinking: the last spans are the short ones, not the first. A product then has to travel after its matmul.
        """
        of_peers = [(owner, piece) for owner in self.peers for piece in self.pieces]
        sizes = span_sizes(len(of_peers), self.span)
        ends = [0, *accumulate(reversed(sizes) if shrinking else sizes)]
        return [of_peers[start:end] for start, end in pairwise(ends)]

    def runs(self, chunks: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Cut chunks that are multiplied together where they are not next to each other in memory: before rank 0."""
        turn = next((number for number, (owner, _) in enumerate(chunks) if number and owner == 0), len(chunks))
        return [part for part in (chunks[:turn], chunks[turn:]) if part]

    def by_copy_stream(self, owners: Iterable[int]) -> list[tuple[str, list[int]]]:
        """Group ranks by the copy stream for their chunks."""
        return grouped({owner: self.copy_for(owner) for owner in owners})

    def copy_for(self, owner: int) -> str:
        """Return the copy stream for all chunks of a rank. Ranks take turns in the order in which they first appear.

        A rank has one stream, because all waits for the same signals must be in one order.
        """
        streams = self._copy_streams
        return self._turns.setdefault(owner, streams[len(self._turns) % len(streams)])

    def pull(
        self, chunk: tuple[int, int], target: Region, *sources: Region, after: Iterable[int] = (), label: str = ""
    ) -> int:
        """Copy a chunk on its owner's copy stream, from ``sources[0]`` (any rank's memory) to ``target`` (this rank's).

        Return the index of the step. Further sources are regions that the copy also reads, such as the offset at which
        the first one begins.
        """
        peers = [sources[0].rank]
        return self.move(
            PULL, chunk[0], reads=sources, writes=[target], after=after, peers=peers, chunk=chunk, label=label
        )

    def move(self, kind: str, owner: int, *, after: Iterable[int] = (), **fields: Any) -> int:
        """Add a copy on the copy stream for ``owner``. Return the index of the step.

        The second stream starts after the first copy, which would otherwise get only half of the link, and with it the
        first matmul that needs a copy.
        """
        stream = self.copy_for(owner)
        if stream not in self._first:
            after = [*after, *self._first.values()]
        self._latest[stream] = step = self.add(kind, stream, after=after, **fields)
        self._first.setdefault(stream, step)
        return step

    @property
    def copied(self) -> list[int]:
        """The latest copy of each copy stream. A step that follows all of them follows every copy so far."""
        return list(self._latest.values())
