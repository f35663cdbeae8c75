"""Record the launches that ops of one rank would make on a GPU, in a group of any size, without a GPU or peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import symm_overlap
from bench.harness.peerless import without_peers
from symm_overlap.runtime import Lane, state_of
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
        """The workspace of that lane."""
        workspace = self.lane.workspace
        assert isinstance(workspace, StandInWorkspace)
        return workspace

    def taken(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return the launches recorded since the last call of this; see csrc/issue/log.h."""
        return self.workspace.driver.take()

    def launched(self) -> list[tuple[str, str, str]]:
        """Return the same launches in words; see `StandInWorkspace.launched`."""
        return self.workspace.launched()


@contextmanager
def standing_in(rank: int, world: int, **forced: Any) -> Iterator[StandIn]:
    """Yield a group in which calls on CPU tensors use the plans of GPUs and are issued to the stand-in.

    Steps that need no Python compute nothing, so the contents of results are undefined.

    Args:
        forced: arguments of `symm_overlap.force_path`; by default the path is "pipelined", on two compute streams.
    """
    path = {"path": "pipelined", "streams": 2, **forced}
    with (
        without_peers(rank, world, "cpu", lambda group, *where: StandInWorkspace(group.size())) as group,
        symm_overlap.force_path(**path),
    ):
        yield StandIn(group, rank)
