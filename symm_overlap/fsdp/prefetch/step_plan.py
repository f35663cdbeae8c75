"""A training step with FSDP2 as a plan that can be verified, simulated and drawn like every other plan.

What is issued (`issue_order`) becomes steps on three streams:

========  =============================================================================================================
compute   the caller's stream: copy-outs, forwards, backwards, reshards, copy-ins of gradients, the optimizer
gather    all-gathers. Each waits for the copy-outs that torch makes the gather streams wait for, but not for compute in
          general: prefetching decides how far gathers run ahead
reduce    reduce-scatters, each after its copy-in
========  =============================================================================================================

Memory that streams hand to each other is a buffer with as many slots as are ever alive at once. "gathered" holds the
outputs of gathers until they are copied out, "reduce inputs" holds gradients until they are reduced. Torch's caching
allocator hands out a block again when the host has freed it. A slot here is that block, so `verify` proves that the
waits which torch puts between the streams suffice. A reshard frees a layer's unsharded parameters. To compute with them
afterwards is a use after free, and to reshard on a stream that does not wait for compute is a race.

By default, gathers and reduce-scatters share one communicator, which carries out one collective at a time in the order
of issue (``set_separate_reduce_scatter_group`` gives them separate ones).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...plan import Builder, Life, Plan, Region, Step
from .issue_order import AWAIT_REDUCE, DEFAULT, RELEASE, WAIT_OPTIMIZER, Issue, Prefetch, issue_order
from .kinds import BACKWARD, COPY_IN, COPY_OUT, FORWARD, GATHER, OPTIMIZER, OTHER, REDUCE, RESHARD
from .trace import Layer, Trace

COMPUTE, GATHERS, REDUCES = "compute", "gather", "reduce"

_BUFFERS = {
    "sharded": Life.PERSISTENT,  # this rank's shard of each layer's parameters
    "sharded gradients": Life.PERSISTENT,
    "gathered": Life.SCRATCH,
    "unsharded": Life.SCRATCH,  # the whole parameters of each layer
    "gradients": Life.SCRATCH,  # of each layer, whole
    "reduce inputs": Life.SCRATCH,
}


@dataclass(frozen=True)
class Options:
    """How a step is run, apart from its prefetching.

    Attributes:
        rounds: how many training steps the plan has, one after another.
        event: whether gathers wait for an event after the optimizer only (`post_optimizer_event`). Otherwise they wait
            for all work that was queued on the compute stream before the forward.
        other: milliseconds of unrelated work between the optimizer and the next forward.
        one_communicator: whether gathers and reduce-scatters are carried out one at a time.
        reduce_inputs: how many inputs of reduce-scatters may be alive.
    """

    rounds: int = 1
    event: bool = False
    other: float = 0.0
    one_communicator: bool = True
    reduce_inputs: int = 1


class StepPlan:
    """The plan of a step, and how long its steps take.

    Attributes:
        plan: the plan of one rank. `for_rank` returns the plans of others, which differ in nothing but the rank.
        issued: the issues that the plan was built from.
    """

    def __init__(self, trace: Trace, issued: Sequence[Issue], options: Options, rank: int = 0, world: int = 1) -> None:
        self.issued = tuple(issued)
        self._trace, self._options = trace, options
        builder = _StepBuilder(trace, options, rank, world)
        self.plan: Plan = builder.plan(self.issued)
        self._times = builder.times

    def for_rank(self, rank: int, world: int) -> Plan:
        """Return the plan of one rank of several."""
        return StepPlan(self._trace, self.issued, self._options, rank, world).plan

    @property
    def costs(self) -> Callable[[int, Step], tuple[float, float]]:
        """The costs to pass to `symm_overlap.plan.simulate`."""
        times = self._times
        return lambda rank, step: (0.0 if step.chunk is None else times[step.kind, step.chunk], 0.0)


def step_plan(trace: Trace, prefetch: Prefetch = DEFAULT, options: Options | None = None) -> StepPlan:
    """Create the plan of a step.

    Args:
        trace: the layers and calls of the model.
        prefetch: which layers each layer gathers ahead.
    """
    options = options or Options()
    return StepPlan(trace, issue_order(trace, prefetch, reduce_inputs=options.reduce_inputs), options)


def peak_bytes(layers: Sequence[Layer], issued: Iterable[Issue]) -> int:
    """Return the most bytes of gathered outputs and unsharded parameters that are alive at once."""
    alive = peak = 0
    for issue in issued:
        if issue.what in (GATHER, COPY_OUT):
            alive += layers[issue.layer].nbytes
        elif issue.what in (RELEASE, RESHARD):
            alive -= layers[issue.layer].nbytes
        peak = max(peak, alive)
    return peak


class _Slots:
    """Hands out blocks of memory, the lowest free one first. A layer that runs twice in a row may have two."""

    def __init__(self) -> None:
        self._used: defaultdict[int, list[int]] = defaultdict(list)  # by layer, the latest last

    def allocate(self, layer: int) -> int:
        used = {slot for slots in self._used.values() for slot in slots}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        self._used[layer].append(slot)
        return slot

    def of(self, layer: int) -> int | None:
        """Return the slot that the layer was given last."""
        return self._used[layer][-1] if self._used[layer] else None

    def free(self, layer: int) -> int:
        """Free the layer's oldest slot, and return it."""
        return self._used[layer].pop(0)


class _StepBuilder(Builder):
    """Turns issues into steps, and keeps track of what the streams must wait for."""

    def __init__(self, trace: Trace, options: Options, rank: int, world: int) -> None:
        super().__init__("FSDP step", rank, world, stream=COMPUTE, buffers=_BUFFERS, inputs={})
        self.times: dict[tuple[str, tuple[int, int]], float] = {}
        self._trace, self._options = trace, options
        self._turns: defaultdict[tuple[str, int], int] = defaultdict(int)  # steps so far of each kind for each layer
        self._latest: dict[tuple[str, int], int] = {}  # the latest step of a kind for a layer
        self._gathered, self._inputs = _Slots(), _Slots()
        self._unsharded: set[int] = set()
        self._copied: dict[int, int] = {}  # for slots of gathered outputs, the step that copied them out
        self._gathers_wait: list[int] = []
        self._compute_waits: list[int] = []
        self._collective: list[int] = []  # the latest collective
        self._event: int | None = None  # the optimizer's step that the next gathers wait for

    def plan(self, issued: Sequence[Issue]) -> Plan:
        for turn in range(self._options.rounds):
            for issue in issued:
                self._issue(issue)
            if self._trace.optimizer > 0:
                self._step_optimizer()
            if self._options.other > 0 and turn + 1 < self._options.rounds:
                self._compute(OTHER, -1, self._options.other)
        return self.finish()

    def _issue(self, issue: Issue) -> None:
        layer = issue.layer
        record = self._trace.layers[layer] if layer >= 0 else None
        if issue.what == WAIT_OPTIMIZER:
            # An event is used once; without a new one, gathers wait for the compute stream.
            self._gathers_wait = [self._last[COMPUTE] if self._event is None else self._event]
            self._event = None
        elif issue.what == RELEASE:
            self._release(layer)
        elif issue.what == AWAIT_REDUCE:
            self._compute_waits.append(self._latest[REDUCE, layer])
            self._inputs.free(layer)
        elif issue.what in (FORWARD, BACKWARD, OTHER):
            self._compute(issue.what, layer, issue.time)
        elif record is not None and issue.what == GATHER:
            writes = [self.here("gathered", self._gathered.allocate(layer))]
            self._meet(GATHER, GATHERS, layer, record.gather, [self.here("sharded", layer)], writes, self._gathers_wait)
        elif record is not None and issue.what == COPY_OUT:
            reads = [self._slot("gathered", self._gathered, layer)]
            writes = [self.here("unsharded", layer)]
            self._unsharded.add(layer)
            after = [self._latest[GATHER, layer]]
            index = self._step(COPY_OUT, COMPUTE, layer, record.copy_out, reads=reads, writes=writes, after=after)
            self._copied[reads[0].start] = index
        elif issue.what == RESHARD:
            self._unsharded.discard(layer)
            self._step(RESHARD, COMPUTE, layer, 0.0, writes=[self.here("unsharded", layer)])
        elif record is not None and issue.what == COPY_IN:
            writes = [self.here("reduce inputs", self._inputs.allocate(layer))]
            reads = [self.here("gradients", layer)]
            self._step(COPY_IN, COMPUTE, layer, record.copy_in, reads=reads, writes=writes)
        elif record is not None and issue.what == REDUCE:
            gradients = self.here("sharded gradients", layer)
            reads = [self._slot("reduce inputs", self._inputs, layer), gradients]
            after = [self._latest[COPY_IN, layer]]
            self._meet(REDUCE, REDUCES, layer, record.reduce, reads, [gradients], after)
        else:
            raise ValueError(f"no such issue: {issue}")

    def _slot(self, buffer: str, slots: _Slots, layer: int) -> Region:
        slot = slots.of(layer)
        assert slot is not None
        return self.here(buffer, slot)

    def _release(self, layer: int) -> None:
        slot = self._gathered.free(layer)
        if (copied := self._copied.pop(slot, None)) is not None:
            self._gathers_wait = [*self._gathers_wait, copied]
        else:  # The gather was not used. Later compute may change the parameters that it reads.
            self._compute_waits.append(self._latest[GATHER, layer])

    def _compute(self, kind: str, layer: int, time: float) -> None:
        reads, writes = [], []
        if layer >= 0:
            record = self._trace.layers[layer]
            needed = record.has_parameters and (kind == FORWARD or record.gathers_in_backward)
            if needed or layer in self._unsharded:
                reads.append(self.here("unsharded", layer))
            if kind == BACKWARD:
                writes.append(self.here("gradients", layer))
        self._step(kind, COMPUTE, layer, time, reads=reads, writes=writes)

    def _meet(
        self,
        kind: str,
        stream: str,
        layer: int,
        time: float,
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: Sequence[int],
    ) -> None:
        """Add a collective. It has a channel for its kind and layer, and follows the previous collective."""
        channel = 2 * layer + (kind == REDUCE)
        shared = self._collective if self._options.one_communicator else []
        index = self._step(
            kind, stream, layer, time, reads=reads, writes=writes, after=[*after, *shared], channel=channel
        )
        self._collective = [index]

    def _step_optimizer(self) -> None:
        count = len(self._trace.layers)
        reads, writes = [self.here("sharded gradients", 0, count)], [self.here("sharded", 0, count)]
        index = self._step(OPTIMIZER, COMPUTE, -1, self._trace.optimizer, reads=reads, writes=writes)
        if self._options.event:
            self._event = index

    def _step(
        self,
        kind: str,
        stream: str,
        layer: int,
        time: float,
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[int] = (),
        channel: int | None = None,
    ) -> int:
        turn = self._turns[kind, layer]
        self._turns[kind, layer] += 1
        chunk = (max(layer, 0), turn)
        self.times[kind, chunk] = time
        if stream == COMPUTE:
            after, self._compute_waits = [*after, *self._compute_waits], []
        name = self._trace.layers[layer].name if layer >= 0 else ""
        index = self.add(
            kind, stream, reads=reads, writes=writes, after=after, chunk=chunk, channel=channel, label=name
        )
        self._latest[kind, layer] = index
        return index
