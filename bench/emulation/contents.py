"""What phantoms would have written by the time that rank 0 reads it: shards, partial results, and sums.

Where that is follows from the plan of rank 0: what it reads in the workspace, and does not write itself.
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
    """The regions of the workspaces that a rank reads, and that others write."""
    written = {region for step in plan.steps for region in step.writes}
    read = dict.fromkeys(region for step in plan.steps for region in step.reads)
    shared = [region for region in read if plan.buffers[region.buffer] is Life.CALL]
    return [region for region in shared if region not in written]


class Contents:
    """What the ranks of one case have.

    Args:
        kind: of the inputs; see `bench.harness.case.inputs`.
    """

    def __init__(self, case: Case, kind: str, device: torch.device) -> None:
        self._case, self._kind, self._device = case, kind, device
        self._partials: dict[int, Tensor] = {}

    def at(self, region: Region, chunks: int, numel: int) -> Tensor:
        """What is in a region that phantoms write, where parts of ranks are cut into ``chunks``; ``numel`` elements."""
        case, rank, unit = self._case, region.rank, region.start
        cut = bounds(case.rows, chunks)
        if case.gathers:
            shard = inputs(case, rank, self._kind, self._device)[0]
            return shard[cut[unit] : cut[unit + 1]]
        # The sum for another rank: in that rank's own part of its memory.
        if case.op == "matmul_all_reduce" and rank and unit // chunks == rank:
            piece = unit % chunks
            rows = slice(rank * case.rows + cut[piece], rank * case.rows + cut[piece + 1])
            wide = torch.promote_types(case.dtype, torch.float32)
            return sum(self._partial(each)[rows].to(wide) for each in range(case.world)).to(case.dtype)  # type: ignore[union-attr]
        # A partial result for rank 0: in the memory of who made it, or pushed from there into that of rank 0, where
        # units are in the order of the ranks that they are from.
        producer, piece = (rank, unit % chunks) if rank else divmod(unit, chunks)
        partial = self._partial(producer)
        return partial if numel == partial.numel() else partial[: case.rows][cut[piece] : cut[piece + 1]]

    def _partial(self, rank: int) -> Tensor:
        """The product of a rank: for all ranks, or the rows for rank 0 where no others are asked for."""
        if rank not in self._partials:
            a, b = inputs(self._case, rank, self._kind, self._device)
            rows = self._case.rows if self._case.op == "matmul_reduce_scatter" else self._case.m
            self._partials[rank] = a[:rows] @ b
        return self._partials[rank]


def fill(state: GroupState, lane: Lane, contents: Contents, case: Case) -> None:
    """Let the phantoms of a lane have their contents, for calls of a case that has been made in both halves."""
    filled = 0
    for route in _routes(state, lane, case):
        plans = {layout: plan for plan, layout in route.layouts.values()}
        for (_, layout, *_), kept in lane._kept.items():
            for region in phantom_regions(plans[layout]) if layout in plans else ():
                view = kept.views[region]
                with torch.inference_mode():  # views that streams of threads have made may be written so alone
                    view.copy_(contents.at(region, route.choice.chunks, view.numel()).reshape(view.shape))
                filled += 1
    assert filled, f"no call of {case} has been made on lane {lane.index}"


def _routes(state: GroupState, lane: Lane, case: Case) -> Iterator[Route]:
    """The routes of calls of a case on a lane."""
    size = case.op, case.m, case.n, case.k, case.dtype
    for (problem, *_), route in state.routes.items():
        if route.lane is lane and (problem.op, problem.m, problem.n, problem.k, problem.dtype) == size:
            yield route
