"""Whether all ranks have made their parts of the same model. No rank may run a step before all have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ..runtime.exchange import said_by_all
from ..runtime.step_runner import count_rejected

SIZES = "numbers of layers of the stages"
LAYERS = "order in which the model calls its layers"
VALUES = "values that pass between stages (digests of how they are computed)"

_PURPOSE = "parts of a pipeline"
_SAME_ARGUMENTS = (
    "Create the PipelineModel with the same arguments on every rank. If each rank measures its own costs, send those "
    "of one rank to all"
)
_SAME_TRACE = (
    "Each rank has traced the model itself, and the model does something else on each. If it walks through a set of "
    "strings, whose order differs between processes, let it sort the set, or start all ranks with the same "
    "PYTHONHASHSEED"
)


class Agreement:
    """The agreement of the ranks of a group on what their parts are.

    Attributes:
        reached: True once all ranks have made their parts, and have found that they agree.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.reached = False
        self._awaited = False  # by ranks that are in `reach`, or will be

    @contextmanager
    def rejecting(self) -> Iterator[None]:
        """Around what may reject a step before it begins: count such a step, and tell ranks that are in `reach`."""
        self._awaited = not self.reached
        try:
            yield
        except BaseException as error:
            count_rejected(self._group)
            if self._awaited and isinstance(error, Exception):
                with suppress(dist.DistBackendError):  # a rank that did not come: the first error is the one to raise
                    self._exchange(f"{type(error).__name__}: {error}", None)
            raise

    def reach(self, mine: Mapping[str, object]) -> bool:
        """Compare what all ranks pass, once. Collective. To be called inside `rejecting`.

        Returns:
            True the first time, when all ranks have come; then False at once.

        Raises:
            ValueError: ranks differ in it.
            RuntimeError: another rank could not make its part.
            torch.distributed.DistBackendError: a rank did not come in time, or has died.
        """
        if self.reached:
            return False
        self._awaited = False
        every = self._exchange(None, mine)
        for rank, (error, _) in enumerate(every):
            if error is not None:
                raise RuntimeError(f"rank {rank} of the pipeline could not make its part of the model: {error}")
        first = every[0][1]
        for rank, (_, theirs) in enumerate(every):
            for what in {**first, **theirs}:
                if theirs.get(what) != first.get(what):
                    raise ValueError(
                        f"ranks 0 and {rank} of the pipeline differ in the {what}: {first.get(what)}, and "
                        f"{theirs.get(what)}. "
                        f"{_SAME_ARGUMENTS if what == SIZES else _SAME_TRACE}"
                    )
        self.reached = True
        return True

    def _exchange(self, error: str | None, mine: Mapping[str, object] | None) -> list[Any]:
        return [json.loads(text) for text in said_by_all(self._group, _PURPOSE, json.dumps([error, mine]))]
