"""The part that all planners of collective matmul share: chunks, compute streams, a copy stream, and the ring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...plan import Builder, Life, Region
from .kinds import PULL


def by_channel(channels: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """Group peers by channel: ``{peer: channel}`` becomes a list of (channel, its peers), one entry for each step."""
    groups: dict[int, list[int]] = {}
    for peer, channel in channels.items():
        groups.setdefault(channel, []).append(peer)
    return list(groups.items())


class CollectiveBuilder(Builder):
    """A `Builder` for plans in which each rank's part is cut into chunks.

    Args:
        op, rank, world, buffers, inputs: see `Builder`.
        chunks: the number of pieces into which each rank's part is cut.
        compute: one or two streams that compute; the first is the caller's.
        copy: the stream of the copies. If it is ``compute[0]``, the copies are on the caller's stream.

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
    ) -> None:
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}: a rank's part must be cut into at least 1 chunk")
        if len(compute) not in (1, 2) or len(set(compute)) != len(compute):
            raise ValueError(f"compute is {compute}: name one compute stream, or two different ones")
        if copy in compute[1:]:
            raise ValueError(f"copy is {copy!r}, the second compute stream: use another name, or {compute[0]!r}")
        self.chunks, self.compute, self.copy = chunks, compute, copy
        self.merged = copy == compute[0]
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

    def pull(self, chunk: tuple[int, int], target: Region, *sources: Region, after: Iterable[int] = ()) -> int:
        """Copy a chunk on the copy stream, from ``sources[0]`` (any rank's memory) to ``target`` (this rank's memory).

        Return the index of the step. Further sources are regions that the copy also reads, such as the offset at which
        the first one begins.
        """
        return self.add(
            PULL, self.copy, reads=sources, writes=[target], after=after, peers=[sources[0].rank], chunk=chunk
        )
