"""``--launches``: the launches that one emulated call would make on a GPU, recorded by a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import symm_overlap
from bench.emulation.link import Link, PacedProgram
from bench.harness.case import Case
from bench.harness.peerless import without_peers
from bench.methods import published
from symm_overlap import _C
from symm_overlap.runtime import state_of
from symm_overlap.runtime.stand_in import StandInWorkspace

Launches = list[tuple[str, str, str]]


class EmulatedStandIn(StandInWorkspace):
    """A stand-in whose peers are behind a link."""

    def __init__(self, world: int, link: Link) -> None:
        super().__init__(world)
        self._link = link

    def new_program(self) -> _C.Program:
        """See `StandInWorkspace.new_program`."""
        return PacedProgram(self._link)


def launches(case: Case, link: Link) -> Iterator[tuple[str, Launches]]:
    """Yield the launches of rank 0 of an emulated group in one call on two compute streams: ours, then torch's plan."""
    a, b = (torch.empty(shape, dtype=case.dtype) for shape in (case.a_shape, case.b_shape))
    with (
        without_peers(0, case.world, "cpu", lambda group, *where: EmulatedStandIn(group.size(), link)) as group,
        symm_overlap.force_path("pipelined", chunks=1, streams=2),
    ):

        def taken(lane: int) -> Launches:
            workspace = state_of(group).lane(group, a.device, lane).workspace
            assert isinstance(workspace, EmulatedStandIn)
            return workspace.launched()

        if case.gathers:
            symm_overlap.all_gather_matmul(a, [b], 0, group, return_A=False)
        elif case.op == "matmul_reduce_scatter":
            symm_overlap.matmul_reduce_scatter(a, b, "sum", 0, group)
        else:
            symm_overlap.matmul_all_reduce(a, b, "sum", group)
        yield "ours", taken(0)
        if case.op != "matmul_all_reduce":
            run = published.gather if case.gathers else published.scatter
            with symm_overlap.lane(published.LANE):
                run(group.group_name, published.described_as(case, "cpu"), a, b)
            yield "torch's published plan", taken(published.LANE)


def listed(case: Case, link: Link) -> str:
    """Format these launches, a line for each."""
    return "".join(
        f"{name}, {case}, link {link.name}\n"
        + "".join(f"  {stream:9} {what:9} {rest}".rstrip() + "\n" for stream, what, rest in made)
        for name, made in launches(case, link)
    )
