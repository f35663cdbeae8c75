"""Compute what FSDP2 issues, and in which order, for given calls of a model: torch's own logic as a pure function.

Checked on torch 2.13.0: ``FSDPState`` and ``FSDPParamGroup`` in ``torch.distributed.fsdp._fully_shard``. The tests
compare it with what real runs issue.

The memory rules are torch's too. In forward, the output of a gather is kept until the next layer is copied out. Only
then do the gather streams wait for the first copy. So with torch's implicit prefetch two gathered outputs are alive,
and a gather waits for the copy-out two layers before it. In backward, the output is freed right after its own copy-out.

Limits of the model: the host is assumed to be ahead of the GPU. ``set_unshard_in_backward`` is modelled,
``set_unshard_async_op`` is not. A module with several parameter groups counts as one. Torch 2.13 makes compute wait for
the oldest reduce-scatter also after a layer whose gradients are not reduced, such as a frozen one. Torch 2.11 does not,
and neither does this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .kinds import BACKWARD, COPY_IN, COPY_OUT, FORWARD, GATHER, OTHER, REDUCE, RESHARD
from .trace import (
    BEGIN,
    END_BACKWARD,
    END_FORWARD,
    POST_BACKWARD,
    POST_FORWARD,
    PRE_BACKWARD,
    PRE_FORWARD,
    UNSHARD,
    Call,
    Layer,
    Trace,
)

WAIT_OPTIMIZER = "wait optimizer"
"""From here on, gathers wait for the optimizer: for its event, or for all work queued on the compute stream."""
RELEASE = "release"
"""From here on, gathers wait for the layer's copy-out and may then reuse the memory of its gathered output. If the
output was not copied out, the compute stream waits for the gather instead."""
AWAIT_REDUCE = "await reduce"
"""From here on, the compute stream waits for the layer's reduce-scatter, whose input is then free."""


class Issue(NamedTuple):
    """Something that the host issues to a stream: a step of a kind of this package, or one of the three waits above.

    Attributes:
        layer: the index of the layer; -1 if the issue belongs to none.
        time: the time of computation, in milliseconds.
    """

    what: str
    layer: int = -1
    time: float = 0.0


@dataclass(frozen=True)
class Prefetch:
    """For each layer, the layers that it gathers ahead when it starts.

    These are the arguments of ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``. A missing
    or empty list keeps torch's default.
    """

    forward: tuple[tuple[int, ...], ...] = ()
    backward: tuple[tuple[int, ...], ...] = ()

    def after(self, layer: int, forward: bool) -> tuple[int, ...]:
        """Return the list of a layer."""
        lists = self.forward if forward else self.backward
        return lists[layer] if layer < len(lists) else ()


DEFAULT = Prefetch()
"""Torch's default."""


@dataclass
class _State:
    """The current state of a layer, as torch tracks it."""

    layer: Layer
    phase: str = ""
    unsharded: bool = False
    pending: bool = False  # a gather was issued, and its output is not copied out yet
    places: list[int] = field(default_factory=list)  # its positions in the order of forwards


def issue_order(trace: Trace, prefetch: Prefetch = DEFAULT, *, reduce_inputs: int = 1) -> list[Issue]:
    """Return what is issued in a step, in order.

    Args:
        reduce_inputs: how many inputs of reduce-scatters may be alive (``set_reduce_scatter_max_input_buffers``).
    """
    machine = Machine(trace.layers, prefetch, reduce_inputs)
    for call in trace.calls:
        machine.call(call)
    return machine.issued


class Machine:
    """Processes the calls of a model one by one.

    Attributes:
        issued: everything issued so far.
        in_backward: whether a backward pass has begun and not ended.
    """

    def __init__(self, layers: Sequence[Layer], prefetch: Prefetch, reduce_inputs: int) -> None:
        self.issued: list[Issue] = []
        self._states = [_State(layer) for layer in layers]
        self._prefetch, self._reduce_inputs = prefetch, reduce_inputs
        self._running: list[tuple[str, int]] = []  # the layers that compute, the innermost last
        self._computed: set[int] = set()  # the running layers that have computed
        self._held: int | None = None  # the layer whose gathered output is kept in forward
        self._forwards: list[int] = []
        self.in_backward = False
        self._reducing: list[int] = []  # the layers whose reduce-scatter inputs are alive

    def call(self, call: Call) -> None:
        self._compute(call)
        if call.what == BEGIN:
            if not self.in_backward:
                self._drop_pending()
            self._issue(WAIT_OPTIMIZER)
        elif call.what == PRE_FORWARD:
            self._pre_forward(call.layer)
        elif call.what == POST_FORWARD:
            self._post_forward(call.layer)
        elif call.what == PRE_BACKWARD:
            self._pre_backward(call.layer)
        elif call.what == POST_BACKWARD:
            self._post_backward(call.layer, call.complete)
        elif call.what == UNSHARD:
            self._unshard(call.layer)
            self._copy_out(call.layer)
        elif call.what == END_FORWARD:
            self._release_held()
        elif call.what == END_BACKWARD:
            self._end_backward(call.complete)
        else:
            raise ValueError(f"no such call: {call}")

    def _issue(self, what: str, layer: int = -1, time: float = 0.0) -> None:
        self.issued.append(Issue(what, layer, time))

    def _compute(self, call: Call) -> None:
        """Issue the computation since the last call. A layer that ends gets a compute step even if it took no time."""
        kind, layer = self._running[-1] if self._running else (OTHER, -1)
        ends = call.layer == layer and call.what in (POST_FORWARD, POST_BACKWARD) and layer not in self._computed
        if call.compute > 0 or (ends and layer >= 0):
            self._issue(kind, layer, call.compute)
            self._computed.add(layer)

    def _starts(self, kind: str, layer: int) -> None:
        self._running.append((kind, layer))
        self._computed.discard(layer)

    def _ends(self, kind: str, layer: int) -> None:
        if (kind, layer) in self._running:
            self._running.remove((kind, layer))

    def _unshard(self, layer: int, phase: str | None = None) -> None:
        state = self._states[layer]
        phase = state.phase if phase is None else phase
        if state.pending or state.unsharded or not state.layer.has_parameters:
            return
        if phase == PRE_BACKWARD and not state.layer.gathers_in_backward:
            return
        self._issue(GATHER, layer)
        state.pending = True

    def _copy_out(self, layer: int) -> None:
        state = self._states[layer]
        if not state.pending:
            return
        forward = state.phase == PRE_FORWARD
        if forward:
            self._release_held()
        self._issue(COPY_OUT, layer)
        state.pending, state.unsharded = False, True
        if forward:
            self._held = layer
        else:
            self._issue(RELEASE, layer)

    def _release_held(self) -> None:
        if self._held is not None:
            self._issue(RELEASE, self._held)
            self._held = None

    def _reshard(self, layer: int) -> None:
        if self._states[layer].unsharded:
            self._states[layer].unsharded = False
            self._issue(RESHARD, layer)

    def _pre_forward(self, layer: int) -> None:
        state = self._states[layer]
        first = state.phase != PRE_FORWARD
        state.phase = PRE_FORWARD
        self._unshard(layer)
        self._copy_out(layer)
        if first:
            for ahead in self._prefetch.after(layer, forward=True):
                self._unshard(ahead, PRE_FORWARD)
            self._starts(FORWARD, layer)

    def _post_forward(self, layer: int) -> None:
        state = self._states[layer]
        self._ends(FORWARD, layer)
        state.phase = ""
        if not self.in_backward:  # in a recomputation the parameters stay for the backward
            if state.layer.reshards:
                self._reshard(layer)
            if state.layer.has_parameters:
                state.places.append(len(self._forwards))
                self._forwards.append(layer)

    def _pre_backward(self, layer: int) -> None:
        state = self._states[layer]
        self.in_backward = True
        ahead = self._prefetch.after(layer, forward=False)
        if state.phase != PRE_BACKWARD:
            state.phase = PRE_BACKWARD
            self._unshard(layer)
            self._copy_out(layer)
            self._starts(BACKWARD, layer)
            if not ahead and state.places:
                place = state.places.pop()
                ahead = (self._forwards[place - 1],) if place else ()
        for other in ahead:
            self._unshard(other, PRE_BACKWARD)

    def _post_backward(self, layer: int, reduces: bool) -> None:
        state = self._states[layer]
        self._ends(BACKWARD, layer)
        state.phase = POST_BACKWARD
        if state.layer.reshards_after_backward:
            self._reshard(layer)
        if reduces:
            while len(self._reducing) >= self._reduce_inputs:
                self._issue(AWAIT_REDUCE, self._reducing.pop(0))
            self._issue(COPY_IN, layer)
            self._issue(REDUCE, layer)
            self._reducing.append(layer)

    def _drop_pending(self) -> None:
        """Drop unused gathers. Torch does so at the end of a backward, a `PrefetchPlan` before the next forward."""
        for layer, state in enumerate(self._states):
            if state.pending:
                self._issue(RELEASE, layer)
                state.pending = False

    def _end_backward(self, last: bool) -> None:
        self.in_backward = False
        self._running = [each for each in self._running if each[0] != BACKWARD]
        for state in self._states:
            state.phase = ""
        if last:
            self._drop_pending()
            for state in self._states:
                state.places.clear()
            self._forwards.clear()
            for layer in self._reducing:
                self._issue(AWAIT_REDUCE, layer)
            self._reducing.clear()
