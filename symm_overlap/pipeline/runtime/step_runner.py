"""How a step is run: over which transport, as which call, and what happens when a rank fails.

The first step of a mode (training, or forwards alone) uses torch.distributed, with messages that describe their
tensors. If the ranks can reach each other's memory, they then exchange these descriptions, and the following steps put
the messages into symmetric memory. Each of these steps is one call of a lane (`symm_overlap.runtime.lane`): a rank that
fails ends the waits of all others, and the others notice a rank that dies.

Every rank counts its steps, including those that it rejected before they began. All messages carry the number of the
step, so that no rank takes a message of one step for one of another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...plan import InlineStreams, Plan, Streams, Table, execute
from ...plan.ranges import range_of_call
from ...runtime import (
    Lane,
    around,
    backend_of,
    call_hash,
    direct_access,
    lane_of_pipelines,
    message_group,
    ranged,
    state_of,
)
from ...settings import Settings, current
from ..csv_text import write_csv
from ..schedule import Schedule
from ..slots import Link, links
from ..step_plan import COMPUTE, COPY, channels_of, step_plan
from .c10d_transport import C10dTransport
from .message import Message, Value
from .step_run import StepRun
from .tied import TiedParameters
from .transport import Slots, SymmetricTransport
from .wire import Wire

OP = "pipeline step"
TRANSPORTS = ("symmetric", "c10d")
_PATIENCE = 1.0
"""How many seconds a rank whose call of a lane has failed waits for what the peers still send beside this call. The
lane cannot be used any more, and the peers learn of the failure without these messages."""
_EXCHANGE = 0x5851F42D4C957F2D  # in place of a mode's digest, in a step in which ranks exchange data


def count_rejected(group: dist.ProcessGroup | None) -> None:
    """Count a step of a group that was rejected before `StepRunner.run` could count it, on the current lane."""
    found = group or dist.group.WORLD
    if found is not None:
        state_of(found).calls[lane_of_pipelines(current().lane_index)] += 1


@dataclass
class Mode:
    """What all steps of one mode have in common. The modes are training steps, and steps of forwards alone.

    Attributes:
        schedule: the schedule, with its messages.
        backward: True if the schedule has backwards.
        links: the links of the schedule.
        through_slots: the plan of this rank for messages in symmetric memory.
        through_library: the plan of this rank for messages by torch.distributed.
        channels: the channel of each link.
        slots: the layout of the messages in symmetric memory; None until the first step has shown what they are.
        digest: a hash of the schedule and the messages, in 64 bits.
        agreed: True once the ranks have checked that they have the same schedule.
    """

    schedule: Schedule
    backward: bool
    links: Mapping[tuple[int, str], Link]
    through_slots: Plan
    through_library: Plan
    channels: Mapping[tuple[int, str], int]
    slots: Slots | None = None
    digest: int = 0
    agreed: bool = False


class StepRunner:
    """Runs the steps of one runtime.

    Args:
        group: the ranks of the pipeline.
        device: the device of the messages.
        tied: the parameters that several stages share.
        transport: one of `TRANSPORTS`. None selects "symmetric" if the ranks reach each other's memory.

    Attributes:
        batches: a description of the batches of these steps, which must be the same on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, tied: TiedParameters, transport: str | None
    ) -> None:
        self._group, self._device, self._tied, self._wanted = group, device, tied, transport
        self._state = state_of(group)
        self._backend = backend_of(device.type)
        self._symmetric = False
        self.batches = ""
        if self._state.fake and self._state.world > 1:
            raise ValueError("the group is a fake one: a pipeline of several ranks needs ranks that send and receive")

    def mode_of(self, schedule: Schedule, backward: bool) -> Mode:
        """Return the mode of the steps of a schedule, which must have its messages."""
        found, rank = links(schedule), self._state.rank
        copy = COPY if self._backend.traits.copy_stream else COMPUTE
        return Mode(
            schedule,
            backward,
            found,
            step_plan(schedule, found, rank, copy=copy),
            step_plan(schedule, found, rank, symmetric=False),
            channels_of(found),
        )

    def run(self, mode: Mode, prepare: Callable[[], StepRun]) -> StepRun:
        """Run one step, and return it.

        Args:
            mode: the mode of the step.
            prepare: creates the step. It is called inside the step, so that the other ranks notice its errors.

        Raises:
            Whatever ``prepare`` and the step raise. The other ranks raise `torch.distributed.DistBackendError`.
            RuntimeError: a CUDA graph is being captured. The step has not begun then.
        """
        if self._state.alone:
            run = prepare()
            self._tied.make_equal(None)
            with self._tied.summing(None, mode.backward):
                self._run(mode.through_library, run, {}, InlineStreams())
            return run
        settings = current()
        lane = self._state.lane(self._group, self._device, lane_of_pipelines(settings.lane_index))
        if lane.workspace.capturing():  # tests/pipeline/test_step_plan.py shows the deadlock
            raise RuntimeError(
                "a pipeline step cannot be captured in a CUDA graph, which may start a wait for a peer ahead of what "
                "the peer waits for"
            )
        self._state.calls[lane.index] += 1
        is_first = not mode.agreed
        # Ranks whose calls on a lane differ notice it by its signals. They compare once more before there are any.
        if is_first or (mode.slots is not None and not lane.workspace.half):
            self._agree(mode, lane, settings)
        rank, world, wire = self._state.rank, self._state.world, self._wire(mode, lane, settings.seconds)
        if is_first:
            wire.connect(rank, world)
        transport = C10dTransport(wire, rank, world, self._device, self._number(lane))
        if mode.slots is not None:
            return self._through_slots(mode, mode.slots, lane, transport, prepare, settings.seconds)
        return self._through_library(mode, lane, transport, prepare, settings.seconds)

    def _number(self, lane: Lane) -> int:
        """Return the number of the current step."""
        return self._state.calls[lane.index]

    def _wire(self, mode: Mode, lane: Lane, seconds: float) -> Wire:
        """Return the wire that carries the messages of one step by torch.distributed."""
        group, rank = message_group(self._state, self._group, lane.index, seconds), self._state.rank
        most = {
            (link.target, mode.channels[key]): link.slots for key, link in mode.links.items() if link.source == rank
        }
        return Wire(group, self._device, seconds, most)

    def _through_slots(
        self,
        mode: Mode,
        slots: Slots,
        lane: Lane,
        transport: C10dTransport,
        prepare: Callable[[], StepRun],
        seconds: float,
    ) -> StepRun:
        """Run a step as a call of a lane. Only the gradients of tied parameters are sent by torch.distributed."""
        plan, tied = mode.through_slots, self._tied
        begun: list[StepRun | None] = []
        written: list[Tensor] = []  # a wait that fails on a GPU fills these with NaN

        def body(parity: int) -> None:
            begun.append(None)
            run = begun[0] = prepare()
            run.transport = SymmetricTransport(slots, lane.workspace, self._backend, parity)
            with tied.summing(transport, mode.backward):
                self._run(plan, run, lane.workspace.steps(), lane.streams)
            written.extend(run.written)

        digest = call_hash(mode.digest, self._number(lane))
        channels = 1 + max(mode.channels.values(), default=0)
        try:
            lane.run(OP, body, written, nbytes=slots.nbytes, channels=channels, seconds=seconds, call_hash=digest)
        except BaseException as error:
            if begun:
                transport.fail(tied.reduce if mode.backward else [], error, _PATIENCE)
            raise
        transport.release()
        assert begun[0] is not None
        return begun[0]

    def _through_library(
        self, mode: Mode, lane: Lane, transport: C10dTransport, prepare: Callable[[], StepRun], seconds: float
    ) -> StepRun:
        """Run a step over torch.distributed. If the ranks can use symmetric memory, lay out the slots afterwards."""
        plan, tied = mode.through_library, self._tied
        steps = [*tied.equalise, *plan.steps, *(tied.reduce if mode.backward else ()), *transport.confirmations]
        try:
            run = prepare()
            tied.make_equal(transport)
            run.transport = transport
            with tied.summing(transport, mode.backward, transport.confirm):
                self._run(plan, run, {}, InlineStreams())
        except BaseException as error:
            transport.fail(steps, error)
            raise
        if self._symmetric:
            self._lay_out(mode, lane, run, seconds)
        return run

    def _agree(self, mode: Mode, lane: Lane, settings: Settings) -> None:
        """Check that all ranks have the same schedule, and decide whether symmetric memory can be used. Collective."""
        mine = {
            "kind of step (training, or forwards alone)": mode.backward,
            "device": self._device.type,
            "transport": self._wanted,
            "forced path": settings.forced_path,
            "schedule": write_csv(mode.schedule),
            "tied parameters": self._tied.named,
            "batch": self.batches,
            "count of steps, which includes rejected ones": self._number(lane),
        }
        for rank, other in enumerate(self._exchange(lane, mine, settings.seconds)):
            for what, value in mine.items():
                if (theirs := other.get(what)) != value:
                    both = f" ({value}, and {theirs})" if what.startswith(("batch", "count")) else ""
                    raise ValueError(
                        f"ranks {self._state.rank} and {rank} of the pipeline differ in their {what}{both}: every rank "
                        "must create its PipelineRuntime with the same arguments, and run the same steps"
                    )
        if self._wanted != "c10d" and settings.forced_path != "c10d":
            self._symmetric = direct_access(self._state, self._device, settings.comparing)
            if self._wanted == "symmetric" and not self._symmetric:
                raise ValueError(
                    'transport is "symmetric", but the ranks cannot reach each other\'s memory: use "c10d", or None'
                )
        mode.agreed = True

    def _lay_out(self, mode: Mode, lane: Lane, run: StepRun, seconds: float) -> None:
        """Exchange the descriptions of this step's messages between all ranks, and lay out the slots for them."""
        mine = {
            f"{stage} {each}": [value.as_data() for value in found] for (stage, each), found in run.messages.items()
        }
        messages: dict[tuple[int, int], Message] = {}
        for theirs in self._exchange(lane, mine, seconds):
            for key, message in theirs.items():
                stage, microbatch = map(int, key.split())
                messages[stage, microbatch] = tuple(Value.from_data(value) for value in message)
        text = json.dumps([write_csv(mode.schedule), mode.backward, sorted(map(str, messages.items()))])
        mode.digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        mode.slots = Slots(mode.links, messages)

    def _exchange(self, lane: Lane, mine: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Send some data to all ranks, and return the data of each rank. Collective."""
        return lane.exchange(OP, mine, seconds, call_hash(_EXCHANGE, self._number(lane)))

    def _run(self, plan: Plan, run: StepRun, meets: Table, streams: Streams) -> None:
        """Execute a plan with the functions of the run and those that signal and wait, as settings transform them."""
        table: Table = ranged({**run.table(), **meets})
        for transform in current().transforms:
            table = transform(plan, table)
        text = f"{OP} of {len(plan.steps)} actions"
        with around(lambda: range_of_call(text, self._device.type, plan.rank, plan.world)):
            execute(plan, table, streams)
            run.conclude()
