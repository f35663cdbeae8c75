"""Data parallelism inside a stage: the actions of the schedule drive FSDP2 and DDP modules.

By default, these modules gather parameters around each forward and backward pass, and reduce gradients after each
backward pass. In a pipeline, both would happen for every microbatch, and already after the input part of a split
backward, which is too early. So this file switches it off in the modules, and actions do it:

- UNSHARD gathers the parameters of all FSDP modules, also of nested ones, whatever their ``reshard_after_forward``.
- RESHARD frees these parameters.
- REDUCE_GRAD reduces, once, the gradients that all microbatches have added up, and frees the parameters. The scale is
  the default of the modules (the mean over the data-parallel ranks), or the one that was set on them.

The modules keep these settings after a step. A split backward needs that: its weight part computes the gradients of the
gathered parameters that the forward pass has used.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ._torch import (
    ReplicatedByDdp,
    ddp_of,
    is_sharded,
    keep_in_reduce_dtype,
    parameter_groups,
    reduce_replicated,
    reduce_sharded,
    reset_sharded,
)


class DataParallel:
    """The FSDP2 and DDP modules of a stage.

    Args:
        module: the stage's module.

    Raises:
        ValueError: a DDP module has ``static_graph=True``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._sharded = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        self._replicated = [inner for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
        self._replicated_in_place = [inner for inner in module.modules() if isinstance(inner, ReplicatedByDdp)]
        inside = {inner for outer in self._sharded for inner in outer.modules() if inner is not outer}
        self._roots = [outer for outer in self._sharded if outer not in inside]
        self._handles: list[Any] = []
        for inner in self._sharded:
            if is_sharded(inner):
                inner.set_reshard_after_forward(False, recurse=False)
        for replicated in self._replicated:
            if replicated.static_graph:
                raise ValueError(
                    "DistributedDataParallel(static_graph=True) counts the gradients of the one backward pass that "
                    "follows a forward pass. A pipeline runs several: leave out static_graph=True"
                )
            replicated.require_backward_grad_sync = False
        for in_place in self._replicated_in_place:
            in_place.set_requires_gradient_sync(False)
        self._set_last(False)

    def unshard(self) -> None:
        """Start to gather the parameters. `wait` completes it."""
        if not self._handles:
            self._handles = [inner.unshard(async_op=True) for inner in self._sharded]

    def wait(self) -> None:
        """Wait for the gathered parameters. Gather those that were not gathered before."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        for inner in self._sharded:
            if not all(group.is_unsharded for group in parameter_groups(inner)):
                inner.unshard()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        if self._handles:
            self.wait()
        for inner in self._sharded:
            inner.reshard()

    def accumulate(self) -> None:
        """Add up the gradients of a microbatch in the type in which they will be reduced, as FSDP does by default."""
        for inner in self._sharded:
            keep_in_reduce_dtype(inner)

    def reduce(self) -> None:
        """Reduce the gradients over the data-parallel ranks."""
        self.wait()
        self._set_last(True)
        for root in self._roots:
            reduce_sharded(root)
        self._set_last(False)
        for replicated in [*self._replicated, *map(ddp_of, self._replicated_in_place)]:
            if replicated is not None:
                reduce_replicated(replicated)

    def clear(self) -> None:
        """Drop the gradients that were not reduced, and free the gathered parameters."""
        if self._handles:
            self.wait()
        for root in self._roots:
            reset_sharded(root)
        self.reshard()

    def _set_last(self, last: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(last)
            root.set_requires_gradient_sync(last)
