"""Builder: adds steps to a plan, and keeps only the dependencies that the order of the streams does not imply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .plan import Life, Plan
from .step import Region, Step


class Builder:
    """Collects the steps of one rank, from the fork (added by the constructor) to the join (added by :meth:`finish`).

    All steps come after the fork and before the join, so a call behaves like one kernel on the caller's stream.

    Args:
        op: the name of the operation.
        rank, world: the rank that runs the plan, and the world size.
        stream: the caller's stream.
        buffers: how long each buffer lives, in the order in which the workspace holds them. Buffers that no step
            touches are left out of the plan.
        inputs: the buffers that the caller has filled when the call starts, with the number of units of each.

    Raises:
        ValueError: the rank is not in the world.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        world: int,
        *,
        stream: str,
        buffers: Mapping[str, Life],
        inputs: Mapping[str, int],
    ) -> None:
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank {rank} of world size {world}: rank must be in 0..world-1, and world at least 1")
        self.op, self.rank, self.world, self.stream = op, rank, world, stream
        self._buffers = buffers
        self._steps: list[Step] = []
        self._before: list[int] = []  # for each step, the bit set of the steps that precede it
        self._last: dict[str, int] = {}  # for each stream, its last step
        self.add("fork", stream, writes=[self.here(name, 0, units) for name, units in inputs.items()])

    @property
    def ends(self) -> list[int]:
        """The last step of each stream so far. A step that follows all of them follows every step."""
        return list(self._last.values())

    def here(self, buffer: str, start: int, count: int = 1) -> Region:
        """Return the region of ``count`` units of this rank's ``buffer``, from unit ``start`` on."""
        return Region(buffer, self.rank, start, start + count)

    def add(
        self,
        kind: str,
        stream: str,
        *,
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        after: Iterable[int] = (),
        peers: Iterable[int] = (),
        channel: int | None = None,
        chunk: tuple[int, int] | None = None,
        label: str = "",
    ) -> int:
        """Append a step and return its index, for the ``after`` of later steps. The arguments are the fields of `Step`.

        Dependencies that stream order or other dependencies imply are dropped, because each dependency costs an event.
        """
        index = len(self._steps)
        before = 0
        if stream in self._last:
            before = self._before[self._last[stream]] | 1 << self._last[stream]
        needed = []
        # Latest first: a dependency that a kept one implies has a smaller index, so it is visited later and dropped.
        for earlier in sorted({0, *after} if index else (), reverse=True):
            if not before >> earlier & 1:
                needed.append(earlier)
                before |= self._before[earlier] | 1 << earlier
        self._steps.append(
            Step(
                kind, stream, tuple(reads), tuple(writes), tuple(reversed(needed)), tuple(peers), channel, chunk, label
            )
        )
        self._before.append(before)
        self._last[stream] = index
        return index

    def signal(
        self,
        stream: str,
        peers: Sequence[int],
        channel: int,
        *,
        after: Iterable[int] = (),
        chunk: tuple[int, int] | None = None,
        label: str = "",
    ) -> list[int]:
        """Add one step that signals ``peers`` in this order. Return a list with its index, or [] without peers."""
        if not peers:
            return []
        return [self.add("signal", stream, after=after, peers=peers, channel=channel, chunk=chunk, label=label)]

    def wait(
        self,
        stream: str,
        peers: Sequence[int],
        channel: int,
        *,
        after: Iterable[int] = (),
        chunk: tuple[int, int] | None = None,
        label: str = "",
    ) -> list[int]:
        """Add one step that waits for all ``peers``. Return a list with its index, or [] without peers."""
        if not peers:
            return []
        return [self.add("wait", stream, after=after, peers=peers, channel=channel, chunk=chunk, label=label)]

    def finish(self, *outputs: Region) -> Plan:
        """Add the join, which reads ``outputs`` and follows the last step of every stream, and return the plan."""
        self.add("join", self.stream, reads=outputs, after=self.ends)
        touched = {region.buffer for step in self._steps for region in step.reads + step.writes}
        buffers = {name: life for name, life in self._buffers.items() if name in touched}
        return Plan(self.op, self.rank, self.world, tuple(self._steps), buffers)
