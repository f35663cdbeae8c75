"""Builder: adds steps to a plan, and keeps only the dependencies that the streams' own order does not give."""

from __future__ import annotations

from collections.abc import Iterable

from .step import Plan, Region, Step


class Builder:
    """Collects the steps of one rank, from its fork (added here) to its join (added by :meth:`finish`).

    Every step follows the fork and the join follows every step, so a call never leaks out of the caller's stream.

    Raises:
        ValueError: an argument common to all planners is out of range.
    """

    def __init__(
        self, op: str, rank: int, world: int, chunks: int, compute: tuple[str, ...], copy: str, parity: int, inputs: int
    ) -> None:
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank {rank} of world size {world}: rank must lie in 0..world-1 and world be at least 1")
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}: a rank's part is cut into at least 1 chunk")
        if parity not in (0, 1):
            raise ValueError(f"parity is {parity}: pass the number of the call modulo 2")
        if len(compute) not in (1, 2) or len(set(compute)) != len(compute):
            raise ValueError(f"compute is {compute}: name one compute stream, or two different ones")
        if copy in compute[1:]:
            raise ValueError(f"copy is {copy!r}, the second compute stream: use another name, or {compute[0]!r}")
        self.op, self.rank, self.world, self.parity = op, rank, world, parity
        self.chunks, self.compute, self.copy = chunks, compute, copy
        self.merged = copy == compute[0]
        self.workspace = f"workspace{parity}"
        self._steps: list[Step] = []
        self._before: list[int] = []  # for each step, the bit set of the steps that precede it
        self._last: dict[str, int] = {}  # for each stream, its last step
        self.add("fork", compute[0], writes=[self.here("input", 0, inputs)])

    @property
    def pieces(self) -> range:
        """The pieces a rank's part is cut into."""
        return range(self.chunks)

    @property
    def peers(self) -> list[int]:
        """The other ranks in the order to fetch from them. Backwards: the order in which they fetch from here."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    @property
    def ends(self) -> list[int]:
        """The last step of each stream so far: what follows these follows everything."""
        return list(self._last.values())

    def here(self, buffer: str, start: int, count: int = 1) -> Region:
        """``count`` units of a buffer of this rank."""
        return Region(buffer, self.rank, start, start + count)

    def unit(self, owner: int, piece: int) -> int:
        """Where a chunk lies in a buffer that holds chunks of all ranks."""
        return owner * self.chunks + piece

    def add(
        self,
        kind: str,
        stream: str,
        *,
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        after: Iterable[int] = (),
        peer: int | None = None,
        channel: int | None = None,
        chunk: tuple[int, int] | None = None,
        label: str = "",
    ) -> int:
        """Append a step; return its index, for the ``after`` of later steps.

        Dependencies that stream order or other dependencies imply are dropped: each one left costs an event.
        """
        index = len(self._steps)
        before = 0
        if stream in self._last:
            before = self._before[self._last[stream]] | 1 << self._last[stream]
        needed = []
        # Latest first: whatever a kept dependency implies has a smaller index, so it comes later and is dropped.
        for earlier in sorted({0, *after} if index else (), reverse=True):
            if not before >> earlier & 1:
                needed.append(earlier)
                before |= self._before[earlier] | 1 << earlier
        self._steps.append(
            Step(kind, stream, tuple(reads), tuple(writes), tuple(reversed(needed)), peer, channel, chunk, label)
        )
        self._before.append(before)
        self._last[stream] = index
        return index

    def pull(self, chunk: tuple[int, int], source: Region, target: Region) -> int:
        """Copy a chunk of ``source``, anyone's memory, to ``target``, mine, on the copy stream."""
        return self.add("pull", self.copy, reads=[source], writes=[target], peer=source.rank, chunk=chunk)

    def finish(self, *outputs: Region) -> Plan:
        """Add the join, which reads ``outputs`` and follows the last step of every stream; return the plan."""
        self.add("join", self.compute[0], reads=outputs, after=self.ends)
        return Plan(self.op, self.rank, self.world, self.parity, tuple(self._steps))
