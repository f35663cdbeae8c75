"""The data that phantoms would have written before rank 0 reads it: shards, partial results, and sums.

The places of this data follow from the plan of rank 0: they are the regions of the workspace that it reads and does not
write itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.harness.case import Case, inputs
from symm_overlap.collective.exchange.bounds import bounds
from symm_overlap.collective.exchange.route import Route
from symm_overlap.plan import Life, Plan, Region
from symm_overlap.runtime import GroupState, Lane


def phantom_regions(plan: Plan) -> list[Region]:
    """Return the regions of the workspaces that a rank reads and that other ranks write."""
    written = {region for step in plan.steps for region in step.writes}
    read = dict.fromkeys(region for step in plan.steps for region in step.reads)
    shared = [region for region in read if plan.buffers[region.buffer] is Life.CALL]
    return [region for region in shared if region not in written]


class Contents:
    """The data of all ranks of one case.

    Args:
        kind: the kind of the inputs; see `bench.harness.case.inputs`.
    """

    def __init__(self, case: Case, kind: str, device: torch.device) -> None:
        self._case, self._kind, self._device = case, kind, device
        self._partials: dict[int, Tensor] = {}

    def at(self, region: Region, chunks: int, numel: int) -> Tensor:
        """Return the data of a region that phantoms write. Each rank's part is cut into ``chunks`` chunks.

        ``numel``: the number of elements in the region.
        """
        case, rank, unit = self._case, region.rank, region.start
        cut = bounds(case.rows, chunks)
        if case.gathers:
            shard = inputs(case, rank, self._kind, self._device)[0]
            return shard[cut[unit] : cut[unit + 1]]
        # The sum that another rank computes, in that rank's own part of its memory.
        if case.op == "matmul_all_reduce" and rank and unit // chunks == rank:
            piece = unit % chunks
            rows = slice(rank * case.rows + cut[piece], rank * case.rows + cut[piece + 1])
            wide = torch.promote_types(case.dtype, torch.float32)
            return sum(self._partial(each)[rows].to(wide) for each in range(case.world)).to(case.dtype)  # type: ignore[union-attr]
        # A partial result for rank 0. It is in the memory of the rank that computed it, or that rank pushed it into the
        # memory of rank 0, where units are in the order of the ranks that pushed them.
        producer, piece = (rank, unit % chunks) if rank else divmod(unit, chunks)
        partial = self._partial(producer)
        return partial if numel == partial.numel() else partial[: case.rows][cut[piece] : cut[piece + 1]]

    def _partial(self, rank: int) -> Tensor:
        """Return a rank's product. For a matmul-reduce-scatter, compute only the rows that rank 0 needs."""
        if rank not in self._partials:
            a, b = inputs(self._case, rank, self._kind, self._device)
            rows = self._case.rows if self._case.op == "matmul_reduce_scatter" else self._case.m
            self._partials[rank] = a[:rows] @ b
        return self._partials[rank]


def fill(state: GroupState, lane: Lane, contents: Contents, case: Case) -> None:
    """Write the phantoms' data into the memory of a lane. Calls of the case must have run in both workspace halves."""
    filled = 0
    for route in _routes(state, lane, case):
        plans = {layout: plan for plan, layout in route.layouts.values()}
        for (_, layout, *_), kept in lane._kept.items():
            for region in phantom_regions(plans[layout]) if layout in plans else ():
                view = kept.views[region]
                with torch.inference_mode():  # views created on threads are inference tensors, writable only in here
                    view.copy_(contents.at(region, route.choice.chunks, view.numel()).reshape(view.shape))
                filled += 1
    assert filled, f"no call of {case} has been made on lane {lane.index}"


def _routes(state: GroupState, lane: Lane, case: Case) -> Iterator[Route]:
    """Yield the routes of a case's calls on a lane."""
    size = case.op, case.m, case.n, case.k, case.dtype
    for (problem, *_), route in state.routes.items():
        if route.lane is lane and (problem.op, problem.m, problem.n, problem.k, problem.dtype) == size:
            yield route
