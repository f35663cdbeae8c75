"""How a step is carried out: over which transport, as which call, and what becomes of it when a rank fails.

The first step of a sort (training, or forwards alone) goes over torch.distributed, with messages that say what they
are. Then the ranks tell each other what the messages were, and the following steps put them into symmetric memory,
where the ranks can reach each other's. Such a step is one call of a lane (`symm_overlap.runtime.lane`): a rank that
fails ends the waits of all others, and one that dies is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ... import _C
from ...plan import InlineStreams, Plan, Table, execute
from ...runtime import Lane, backend_of, direct_access, message_group, state_of
from ...settings import Settings, current
from ..csv_text import write_csv
from ..schedule import Schedule
from ..slots import links
from ..step_plan import COMPUTE, COPY, channels_of, step_plan
from .c10d_transport import C10dTransport
from .message import Message, Value
from .step_run import StepRun
from .tied import TiedParameters
from .transport import Slots, SymmetricTransport

OP = "pipeline step"
TRANSPORTS = ("symmetric", "c10d")
_LANES_FROM = 1 << 20  # those of the ops are numbered from 0
_ODD = 0x9E3779B97F4A7C15  # spreads the count of steps over all bits of the hash
_64_BITS = (1 << 64) - 1


@dataclass
class Sort:
    """What the steps of one sort have in common.

    Attributes:
        schedule: with its messages.
        backward: whether it has backwards.
        through_slots, through_library: the plans of this rank over the two transports.
        channels: how many a lane needs.
        slots: where messages go in symmetric memory, once the first step has told what they are.
        digest: 64 bits that stand for the schedule and the messages.
        met: whether the ranks know that they have the same schedule.
    """

    schedule: Schedule
    backward: bool
    through_slots: Plan
    through_library: Plan
    channels: int
    slots: Slots | None = None
    digest: int = 0
    met: bool = False


class Carrier:
    """Carries out the steps of one runtime.

    Args:
        transport: one of `TRANSPORTS`, or None for the better one that the ranks have.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, tied: TiedParameters, transport: str | None
    ) -> None:
        self._group, self._device, self._tied, self._wanted = group, device, tied, transport
        self._state = state_of(group)
        self._backend = backend_of(device.type)
        self._symmetric = False

    def sort_of(self, schedule: Schedule, backward: bool) -> Sort:
        """What the steps of a schedule, which has its messages, have in common."""
        found, rank = links(schedule), self._state.rank
        copy = COPY if self._backend.traits.copy_stream else COMPUTE
        return Sort(
            schedule,
            backward,
            step_plan(schedule, found, rank, copy=copy),
            step_plan(schedule, found, rank, symmetric=False),
            channels=1 + max(channels_of(found).values(), default=0),
        )

    def carry_out(self, sort: Sort, prepare: Callable[[], StepRun]) -> StepRun:
        """One step, which ``prepare()`` makes.

        Raises:
            Whatever ``prepare`` and the step raise, and on the other ranks `torch.distributed.DistBackendError`.
        """
        if self._state.alone:
            run = prepare()
            execute(sort.through_library, _table(sort.through_library, run, {}), InlineStreams())
            return run
        settings = current()
        lane = self._state.lane(self._group, self._device, _LANES_FROM + settings.lane_index)
        if not sort.met:
            self._meet(sort, settings)
        group = message_group(self._state, self._group, lane.index, settings.seconds)
        transport = C10dTransport(group, self._device)
        if sort.slots is not None:
            return self._through_slots(sort, sort.slots, lane, transport, prepare, settings.seconds)
        return self._through_library(sort, transport, prepare)

    def _through_slots(
        self,
        sort: Sort,
        slots: Slots,
        lane: Lane,
        transport: C10dTransport,
        prepare: Callable[[], StepRun],
        seconds: float,
    ) -> StepRun:
        """A step as a call of a lane. Tied parameters alone go over torch.distributed."""
        plan, tied, made = sort.through_slots, self._tied, []

        def body(parity: int) -> None:
            run = prepare()
            made.append(run)
            run.transport = SymmetricTransport(slots, lane.workspace, self._backend, parity)
            with tied.summing(transport, sort.backward):
                execute(plan, _table(plan, run, lane.workspace.steps()), lane.streams)

        call_hash = (sort.digest + lane.calls * _ODD) & _64_BITS or 1
        try:
            lane.run(OP, body, (), nbytes=slots.nbytes, channels=sort.channels, seconds=seconds, call_hash=call_hash)
        except BaseException as error:
            transport.fail(tied.reduce if sort.backward else [], error)
            raise
        transport.release()
        return made[0]

    def _through_library(self, sort: Sort, transport: C10dTransport, prepare: Callable[[], StepRun]) -> StepRun:
        """A step over torch.distributed, after which the ranks may know enough to use symmetric memory."""
        plan, tied = sort.through_library, self._tied
        steps = [*tied.equalise, *plan.steps, *(tied.reduce if sort.backward else ()), *transport.ends]
        try:
            tied.make_equal(transport)
            run = prepare()
            run.transport = transport
            with tied.summing(transport, sort.backward):
                execute(plan, _table(plan, run, {}), InlineStreams())
            transport.confirm()
        except BaseException as error:
            transport.fail(steps, error)
            raise
        if self._symmetric:
            self._learn(sort, run)
        return run

    def _meet(self, sort: Sort, settings: Settings) -> None:
        """Find out, once, whether all ranks have the same schedule, and which transport serves."""
        csv = write_csv(sort.schedule)
        mine = {"schedule": csv, "backward": sort.backward, "transport": self._wanted}
        for rank, other in enumerate(self._tell(mine)):
            for what, value in mine.items():
                if other.get(what) != value:
                    raise ValueError(
                        f"ranks {self._state.rank} and {rank} of the pipeline differ in their {what}: every rank makes "
                        "its PipelineRuntime with the same arguments, and makes the same steps"
                    )
        if self._wanted != "c10d" and settings.forced_path != "c10d":
            self._symmetric = direct_access(self._state, self._device, settings.comparing)
            if self._wanted == "symmetric" and not self._symmetric:
                raise ValueError(
                    'transport is "symmetric", but the ranks cannot reach each other\'s memory: use "c10d", or None'
                )
        sort.met = True

    def _learn(self, sort: Sort, run: StepRun) -> None:
        """Tell the other ranks what the messages of this step were, and hear of theirs."""
        mine = {
            f"{stage} {each}": [value.as_data() for value in found] for (stage, each), found in run.messages.items()
        }
        messages: dict[tuple[int, int], Message] = {}
        for told in self._tell(mine):
            for key, message in told.items():
                stage, microbatch = map(int, key.split())
                messages[stage, microbatch] = tuple(Value.from_data(value) for value in message)
        text = json.dumps([write_csv(sort.schedule), sort.backward, sorted(map(str, messages.items()))])
        sort.digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        sort.slots = Slots(links(sort.schedule), messages)

    def _tell(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tell all ranks something; return what each of them told. Collective."""
        return [json.loads(text) for text in _C.exchange(self._state.name, OP, json.dumps(mine), OP)]


def _table(plan: Plan, run: StepRun, meets: Table) -> Table:
    """What carries out the steps of the run, those in which ranks meet, and what settings make of these."""
    table: Table = {**run.table(), **meets}
    for transform in current().transforms:
        table = transform(plan, table)
    return table
