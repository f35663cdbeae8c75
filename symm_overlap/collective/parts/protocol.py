"""What an exchange calls to compute: a consumer of what an all-gather brings, or a producer of what a reduction sums.

They are objects, not callbacks, so that an exchange can see their matmul: its operands and its outputs. Each can work
on one part, and on everything at once; an exchange calls whichever it needs. Memory that several calls share is
allocated before the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Consumer(Protocol):
    """Processes the shards of all ranks.

    Attributes:
        outputs: the tensors that are written.
        accumulates: whether every part is added to the same output, so that parts cannot be processed at the same time.
    """

    outputs: Sequence[Tensor]
    accumulates: bool

    def part(self, rank: int, start: int, part: Tensor) -> None:
        """Consume rows ``start`` on of the flat shard of ``rank``. The local shard comes first."""

    def shards(self, shards: Sequence[Tensor]) -> None:
        """Consume all flat shards in place, in rank order."""

    def whole(self, gathered: Tensor) -> None:
        """Consume the flat gathered tensor."""


class Producer(Protocol):
    """Computes what is summed over ranks and then belongs to one rank each: matrices of one shape.

    Attributes:
        kept: outputs of the call besides the sum. The code that computes a part also writes it to its place in them.
        made: the tensor that is summed, if it already exists: (world * rows, columns), contiguous.
        kept_sum: the tensor in ``kept`` that equals what is summed, if its rows are in rank order. A part may be
            computed there.
        dtype: the dtype of the parts; None: that of the output.
    """

    kept: Sequence[Tensor] = ()
    kept_sum: Tensor | None = None
    made: Tensor | None = None
    dtype: torch.dtype | None = None

    def part(self, owner: int, start: int, out: Tensor) -> None:
        """Write rows ``start`` on of the part for ``owner`` to ``out``."""

    def whole(self, out: Tensor) -> None:
        """Write the parts for all ranks, in rank order, to ``out``: (world * rows, columns)."""


class RowProducer(Protocol):
    """Computes a matrix that is summed over ranks, for all ranks.

    The ranks share out its rows, whose number need not be a multiple of the world size.
    """

    def rows(self, start: int, out: Tensor) -> None:
        """Write rows ``start`` on to ``out``."""

    def whole(self, out: Tensor) -> None:
        """Write everything to ``out``, which is contiguous and may have another shape."""
