"""Ops on a GPU that is not there: what one rank of a group of any size would launch, without any peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import symm_overlap
from symm_overlap.runtime import TRAITS, Lane, backend_of, state_of
from symm_overlap.runtime.stand_in import StandInWorkspace
from symm_overlap.settings import current


@dataclass(frozen=True)
class StandIn:
    """Rank ``rank`` of ``group``, whose peers do not exist."""

    group: dist.ProcessGroup
    rank: int

    @property
    def lane(self) -> Lane:
        """The lane of its calls."""
        return state_of(self.group).lane(self.group, torch.device("cpu"), current().lane_index)

    @property
    def workspace(self) -> StandInWorkspace:
        """That of the lane."""
        workspace = self.lane.workspace
        assert isinstance(workspace, StandInWorkspace)
        return workspace

    def taken(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """What was launched since the last time: see csrc/issue/log.h."""
        return self.workspace.driver.take()

    def launched(self) -> list[tuple[str, str, str]]:
        """The same in words; see `StandInWorkspace.launched`."""
        return self.workspace.launched()


@contextmanager
def standing_in(rank: int, world: int, **forced: Any) -> Iterator[StandIn]:
    """Calls on CPU tensors, in the group that this yields, take the plans of GPUs and are issued to the stand-in.

    Nothing is computed by steps that need no Python, so results are whatever was in memory.

    Args:
        forced: arguments of `symm_overlap.force_path`; by default the path is "pipelined", on two compute streams.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    backend = backend_of("cpu")
    gpu = replace(TRAITS["cuda"], device="cpu")
    try:
        assert dist.group.WORLD is not None
        state = state_of(dist.group.WORLD)
        state.fake = state.alone = False
        state.direct["cpu"] = True
        path = {"path": "pipelined", "streams": 2, **forced}
        with (
            mock.patch.object(backend, "traits", gpu, create=True),
            mock.patch.object(backend, "workspace", lambda group, *where: StandInWorkspace(group.size())),
            mock.patch("symm_overlap._C.refuse_rendezvous"),
            symm_overlap.force_path(**path),
        ):
            yield StandIn(dist.group.WORLD, rank)
    finally:
        dist.destroy_process_group()
