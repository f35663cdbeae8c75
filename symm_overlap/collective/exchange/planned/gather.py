"""An all-gather that runs a plan: every rank's shard is consumed, kept, or both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ....plan import Plan, Region, Step, Table
from ....runtime import Copy, Fixed, Part, Work, carry_out, tensor_of, view_of
from ...choosing.plans import RING, gather_plan
from ...layouts import PartsLayout
from ...parts.described import DescribedConsumer
from ...parts.protocol import Consumer
from ..bounds import bounds
from ..call import Call
from .run import Run, scratch

_OFFSET_BYTES = torch.int64.itemsize


class Gather(Run):
    """See `symm_overlap.collective.exchange.planned.all_gather`."""

    def __init__(
        self, call: Call, parts: PartsLayout, shard: Tensor, consumer: Consumer | None, gathered: Tensor | None
    ) -> None:
        self.shard, self.parts, self.consumer = shard, parts, consumer
        key = "gather", gathered is not None, consumer is not None, consumer is not None and consumer.accumulates
        plan = call.route.plans.get(key)
        if plan is None:
            plan = call.route.plans[key] = self.plan_of(call, *key[1:])
        self.chunks = call.choice.chunks
        self.cut = bounds(parts.rows, self.chunks)
        outputs = [] if consumer is None else list(consumer.outputs)
        # Callers gather a weight because they have no memory for all of it, so "gathered" is a small ring.
        self.rings = call.problem.op_kind.moves_weight and gathered is None and not call.choice.whole
        if self.rings:
            self.gathered = scratch(plan, "gathered", lambda: shard.new_empty(RING, self.cut[1], parts.columns))
        elif gathered is None:
            self.gathered = scratch(plan, "gathered", lambda: parts.new_gathered(shard))
        else:
            self.gathered = gathered
            outputs.append(gathered)
        piece = self.cut[1] * parts.columns * shard.itemsize
        tensors = {"input": shard} if self.gathered is None else {"input": shard, "gathered": self.gathered}
        super().__init__(call, plan, outputs, tensors, *self.described(), workspace=piece, offset=_OFFSET_BYTES)

    def described(self) -> tuple[Sequence[Tensor], Hashable]:
        """Return the operands and the variant of the run; see `Run`."""
        consumer = self.consumer
        return (consumer.operands, consumer.variant) if isinstance(consumer, DescribedConsumer) else ((), None)

    def plan_of(self, call: Call, keep: bool, consume: bool, accumulate: bool) -> Plan:
        """Return the plan of a call; the route keeps it."""
        traits = call.backend.traits
        return gather_plan(
            call.problem,
            call.choice,
            call.rank,
            in_place=traits.in_place,
            keep=keep,
            consume=consume,
            accumulate=accumulate,
            symmetric=call.symmetric,
            # All calls that are not symmetric share one plan.
            announce_offset=traits.announces_offset or not call.symmetric,
        )

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        buffer, cut = region.buffer, self.cut
        if buffer == "workspace":
            rows = cut[region.start + 1] - cut[region.start]
            return self.shared(region, (rows, self.shard.shape[1]), self.shard.dtype)
        if buffer == "input":
            part, piece = self._input_of(region.rank), region.start
        else:
            assert self.gathered is not None
            if self.rings:
                return self.gathered[region.start]  # the last piece of a shard may be shorter
            if region.stop - region.start > 1:  # the parts of several ranks
                return self.gathered[region.start * self.parts.rows : region.stop * self.parts.rows]
            owner, piece = divmod(region.start, self.chunks)
            part = self.parts.part(self.gathered, owner)
        return part if self.chunks == 1 else part[cut[piece] : cut[piece + 1]]

    def _input_of(self, rank: int) -> Tensor:
        """Return the shard of a rank, in that rank's memory.

        A peer has announced its offset before it signalled, or the offset is the same on all ranks.
        """
        if rank == self.call.rank:
            return self.shard
        if self.call.backend.traits.announces_offset:
            offset = int(self.shared(Region("offset", rank, 0, 1), (1,), torch.int64))
        else:
            offset = int(self.shard.storage_offset())
        return self.call.peer_shard(self.shard, rank, offset)

    def steps(self) -> Table:
        """See `Run.steps`."""
        pulls = {"pull": self._pull} if self.rings else {}
        return {"consume": self._consume, "announce": self._announce, **pulls}

    def work(self, step: Step) -> Sequence[Work] | None:
        """See `Run.work`."""
        of_peer = any(region.buffer == "input" and region.rank != self.call.rank for region in step.reads)
        if of_peer and self.call.backend.traits.announces_offset:
            return None  # a peer announces in each call where its input begins
        if step.kind == "pull" and (of_peer or self.rings):
            return [self._copy_of_pull(step)]
        if step.kind != "consume" or not isinstance(self.consumer, DescribedConsumer):
            return None
        if step.chunk is not None:
            rank, piece = step.chunk
            return self.consumer.part_work(rank, self.cut[piece], self._piece(step.reads[0], piece))
        if step.reads[0].buffer == "gathered":
            return self.consumer.work(self.gathered)
        return self.consumer.shards_work([self.operand(region) for region in step.reads[: self.call.world]])

    def _piece(self, region: Region, piece: int) -> Tensor | Part:
        """Return the tensor at a region, cut to the rows of this piece: a place in a ring may have room for more."""
        place, rows = self.operand(region), self.cut[piece + 1] - self.cut[piece]
        return view_of(place, lambda view: view[:rows]) if region.buffer == "gathered" and self.rings else place

    def _copy_of_pull(self, step: Step) -> Copy:
        (target,), source = step.writes, self.at(step.reads[0])
        to = self.operand(target) if step.chunk is None else self._piece(target, step.chunk[1])
        # A route is for one place in symmetric memory, and a script is for one layout of one route.
        return Copy(to, Fixed(source) if self.call.symmetric else source)

    def _announce(self, step: Step) -> None:
        self.shared(step.writes[0], (1,), torch.int64).fill_(int(self.shard.storage_offset()))

    def _pull(self, step: Step) -> None:
        carry_out(self.call.backend, [self._copy_of_pull(step)])

    def _consume(self, step: Step) -> None:
        assert self.consumer is not None
        if step.chunk is not None:
            rank, piece = step.chunk
            self.consumer.part(rank, self.cut[piece], tensor_of(self._piece(step.reads[0], piece)))
        elif step.reads[0].buffer == "gathered":
            assert self.gathered is not None
            self.consumer.whole(self.gathered)
        else:  # the regions after the shards hold the announced offsets
            self.consumer.shards([self.at(region) for region in step.reads[: self.call.world]])
