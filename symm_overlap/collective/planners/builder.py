"""What all planners of collective matmul have in common: chunks, compute streams, a copy stream, and the ring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...plan import Builder, Life, Region
from .kinds import PULL


def by_channel(channels: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """Peers, given with the channel of each, as steps can meet them: every channel with its peers."""
    groups: dict[int, list[int]] = {}
    for peer, channel in channels.items():
        groups.setdefault(channel, []).append(peer)
    return list(groups.items())


class CollectiveBuilder(Builder):
    """A `Builder` for plans in which each rank's part is cut into chunks.

    Args:
        op, rank, world, buffers, inputs: see `Builder`.
        chunks: pieces that the part of each rank is cut into.
        compute: one or two streams that compute; the first is the caller's.
        copy: the stream of the copies; ``compute[0]`` puts them on the caller's stream.

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
            raise ValueError(f"chunks is {chunks}: a rank's part is cut into at least 1 chunk")
        if len(compute) not in (1, 2) or len(set(compute)) != len(compute):
            raise ValueError(f"compute is {compute}: name one compute stream, or two different ones")
        if copy in compute[1:]:
            raise ValueError(f"copy is {copy!r}, the second compute stream: use another name, or {compute[0]!r}")
        self.chunks, self.compute, self.copy = chunks, compute, copy
        self.merged = copy == compute[0]
        super().__init__(op, rank, world, stream=compute[0], buffers=buffers, inputs={"input": inputs})

    @property
    def pieces(self) -> range:
        """The pieces a rank's part is cut into."""
        return range(self.chunks)

    @property
    def peers(self) -> list[int]:
        """The other ranks in the order to fetch from them. Backwards: the order in which they fetch from here."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def unit(self, owner: int, piece: int) -> int:
        """Where a chunk lies in a buffer that holds chunks of all ranks."""
        return owner * self.chunks + piece

    def pull(self, chunk: tuple[int, int], target: Region, *sources: Region, after: Iterable[int] = ()) -> int:
        """Copy a chunk of ``sources[0]``, anyone's memory, to ``target``, mine, on the copy stream.

        Further sources say what else the copy reads, such as where the first one lies.
        """
        return self.add(
            PULL, self.copy, reads=sources, writes=[target], after=after, peers=[sources[0].rank], chunk=chunk
        )
