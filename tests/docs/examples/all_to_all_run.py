"""Runs the plan of ``all_to_all`` on tensors: which tensor each region is, and what runs the steps that compute."""

from __future__ import annotations

from torch import Tensor

from symm_overlap.collective.exchange.call import Call
from symm_overlap.collective.exchange.planned.run import Run
from symm_overlap.plan import Region, Table
from tests.docs.examples.all_to_all import all_to_all


class AllToAll(Run):
    """One call. ``output[r] = the X of rank r, at this rank``.

    Args:
        X: (world, ...), contiguous, of one shape on all ranks; ``X[r]`` is for rank r.
        output: like ``X``.
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
        """Nothing computes."""
        return {}
