"""Runs the plan of ``all_to_all`` on tensors: maps regions to tensors, and steps that compute to functions."""

from __future__ import annotations

from torch import Tensor

from symm_overlap.collective.exchange.call import Call
from symm_overlap.collective.exchange.planned.run import Run
from symm_overlap.plan import Region, Table
from tests.docs.examples.all_to_all import all_to_all


class AllToAll(Run):
    """One call. On rank p, ``output[r]`` becomes ``X[p]`` of rank r.

    Args:
        X: (world, ...), contiguous, with the same shape on all ranks. ``X[r]`` is for rank r.
        output: has the shape and dtype of ``X``.
    """

    def __init__(self, call: Call, X: Tensor, output: Tensor) -> None:
        plan = all_to_all(call.rank, call.world)
        super().__init__(call, plan, [output], {"input": X, "output": output}, workspace=X.nbytes // call.world)
        self.X, self.output = X, output

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        if region.buffer == "workspace":
            return self.shared(region, (region.stop - region.start, *self.X.shape[1:]), self.X.dtype)
        return (self.X if region.buffer == "input" else self.output)[region.start : region.stop]

    def steps(self) -> Table:
        """Return an empty table, because no step computes anything."""
        return {}
