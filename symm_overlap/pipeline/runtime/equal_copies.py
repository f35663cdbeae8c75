"""Give the copies of tied parameters equal values before there is a step, which does so itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...runtime import lane_of_pipelines, message_group, state_of
from ...settings import current
from ..schedule import Schedule
from .c10d_transport import C10dTransport
from .stage import Stage
from .tied import TiedParameters
from .ties import Copies
from .wire import Wire

_BEFORE_STEPS = 0  # steps are numbered from 1


def make_copies_equal(
    schedule: Schedule,
    stages: Sequence[Stage],
    tied: Sequence[Copies],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Give every copy of a tied parameter the value of the lowest stage's copy. Collective.

    Args:
        stages: the stages of this rank.
        tied: see `PipelineRuntime`; the same on every rank.
        device: the device of the parameters.

    Raises:
        ValueError: copies have different shapes.
        torch.distributed.DistBackendError: a rank has died, or did not come before the deadline.
    """
    found = group or dist.group.WORLD
    assert found is not None
    state = state_of(found)
    if state.fake or not tied:
        return
    copies = TiedParameters(schedule, {stage.index: stage for stage in stages}, tied, state.rank)
    if state.alone:
        copies.make_equal(None)
        return
    settings = current()
    carrier = message_group(state, found, lane_of_pipelines(settings.lane_index), settings.seconds)
    wire = Wire(carrier, device, settings.seconds, {})
    wire.connect(state.rank, state.world)
    transport = C10dTransport(wire, state.rank, state.world, device, _BEFORE_STEPS)
    copies.make_equal(transport)
    transport.release()
