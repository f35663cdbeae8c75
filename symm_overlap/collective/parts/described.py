"""Consumers and producers that can describe their work as data, in addition to carrying it out.

An exchange may have described work carried out without Python (`symm_overlap.runtime.script`). Other work is carried
out by the consumer or producer itself, from the same records. So there is only one description of the work.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from ...runtime import Backend, Part, Work, carry_out


class _Described:
    """The common part of all classes here.

    Attributes:
        operands: the caller's tensors that the work uses, except outputs of the call. Equal calls list them in the same
            order.
        variant: what the work depends on besides the problem of the call.
    """

    backend: Backend
    operands: Sequence[Tensor]
    variant: Hashable = None

    def work(self, whole: Tensor | Part) -> Sequence[Work]:
        """Return what ``whole(whole)`` does."""
        raise NotImplementedError

    def whole(self, whole: Tensor) -> None:
        """See `symm_overlap.collective.parts.protocol`."""
        carry_out(self.backend, self.work(whole))


class DescribedParts(_Described):
    """A consumer or a producer (`symm_overlap.collective.parts.protocol`) of parts that belong to one rank each."""

    def part_work(self, rank: int, start: int, part: Tensor | Part) -> Sequence[Work]:
        """Return what ``part(rank, start, part)`` does."""
        raise NotImplementedError

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """See `symm_overlap.collective.parts.protocol`."""
        carry_out(self.backend, self.part_work(rank, start, part))


class DescribedConsumer(DescribedParts):
    """A consumer that can describe its work."""

    def shards_work(self, shards: Sequence[Tensor | Part]) -> Sequence[Work] | None:
        """Return what ``shards(shards)`` does; None if it cannot be described."""
        return [work for rank, shard in enumerate(shards) for work in self.part_work(rank, 0, shard)]

    def shards(self, shards: Sequence[Tensor]) -> None:
        """See `symm_overlap.collective.parts.protocol.Consumer`."""
        work = self.shards_work(shards)
        assert work is not None
        carry_out(self.backend, work)


class DescribedRows(_Described):
    """A producer of rows (`symm_overlap.collective.parts.rows`)."""

    def rows_work(self, start: int, out: Tensor | Part) -> Sequence[Work]:
        """Return what ``rows(start, out)`` does."""
        raise NotImplementedError

    def rows(self, start: int, out: Tensor) -> None:
        """See `symm_overlap.collective.parts.protocol.RowProducer`."""
        carry_out(self.backend, self.rows_work(start, out))
