"""The exchange of calls that only note what they need (`symm_overlap.prepare`) and need no workspace.

Nothing travels, and nothing is computed. Calls that need workspace note it where they would use it (`planned.run`).
"""

from __future__ import annotations

from torch import Tensor

from ..layouts import PartsLayout
from ..parts.protocol import Consumer, Producer, RowProducer
from .call import Call


def all_gather(
    call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
) -> None:
    """See `planned.all_gather`."""
    _note(call)


def reduce_scatter(call: Call, producer: Producer, output: Tensor, average: bool) -> None:
    """See `planned.reduce_scatter`."""
    _note(call)


def all_reduce(call: Call, producer: RowProducer, output: Tensor, average: bool) -> None:
    """See `planned.all_reduce`."""
    _note(call)


def _note(call: Call) -> None:
    if call.choice.exchange == "c10d":
        call.settings.needs.collectives(call)
