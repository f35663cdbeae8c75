"""Record a training step: the order in which layers run, how long they compute, and how long their gathers take.

Until the step is over, torch's own methods are replaced on the objects of one model. The replacements note when they
are called and then call the originals. On an accelerator, the times are those of its streams, without waiting for the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from .. import _torch
from .clock import EventClock, HostClock, Stamp, clock_of
from .seen import Seen, Spans, TimedGather, TimedReduce
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

MOST_CALLS = 100_000
"""A record that grows longer than this is dropped, and recording begins again with the next forward. Forwards without a
backward, as in an evaluation with gradients, would otherwise fill the memory."""


class Recorder:
    """Records until the end of a backward pass in which gradients were reduced, if any require it.

    Forwards without gradients are not recorded. If a step raises, its record is dropped when the next step begins. But
    a forward that has ended counts as a part of the step that the next backward ends.

    Args:
        model: a module that FSDP2 shards, or one that contains such modules.
        done: called with the trace at the end of that backward pass.
        skip: how many such steps to skip first.
        skipped: called after each of these.
    """

    def __init__(
        self, model: nn.Module, done: Callable[[Trace], None], skip: int = 0, skipped: Callable[[], None] = lambda: None
    ) -> None:
        self.layers = [
            Seen(name, module, state, _torch.groups_of(state)) for name, module, state in _torch.sharded_modules(model)
        ]
        self.clock: HostClock | EventClock = clock_of(_torch.device_of(self.layers[0].state))
        self._done, self._skip, self._skipped = done, skip, skipped
        self._calls: list[tuple[str, int, Spans, bool]] = []
        self._gap: Spans = []  # the computation since the last call
        self._left: Stamp = None  # when torch's hooks last returned to the model
        self._inside = 0  # nesting depth in torch's hooks
        self.root = self.watched = -1  # the outermost module that began last, and that outside of recomputations
        self.stopped = False
        self.recording = False  # whether the outermost forward that began last has gradients, or its backward runs
        self._undo: list[Callable[[], None]] = []
        for index, layer in enumerate(self.layers):
            self._watch(index, layer)

    def why_no_gather(self) -> str:
        """Return why no gather was seen although there are peers; empty if one was seen."""
        peers = any(_torch.has_peers(group) for layer in self.layers for group in layer.groups)
        if not peers or any(spans for layer in self.layers for spans in layer.gather.values()):
            return ""
        if any(spans for layer in self.layers for spans in layer.copy_out.values()):
            return "its communication was replaced while a step was recorded: call apply before plan_prefetch"
        return (
            "the recorded forward and backward gathered nothing, because the parameters were still gathered from an "
            "earlier pass: there is nothing to prefetch"
        )

    def stop(self) -> None:
        """Restore torch's methods. Methods that others have wrapped in the meantime act as the original from now on."""
        self.stopped, self.recording = True, False
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _watch(self, index: int, layer: Seen) -> None:
        state, on = layer.state, self._replace
        on(state, "_root_pre_forward", partial(self._begin, index))
        on(state, "_pre_backward", partial(self._pre_backward, index))
        on(state, "_root_post_backward_final_callback", partial(self._end_backward, state))
        hook = layer.module.register_forward_hook(torch.compiler.disable(partial(self._end_forward, index)))
        self._undo.append(hook.remove)
        for place, group in enumerate(layer.groups):
            first, last = place == 0, place == len(layer.groups) - 1
            on(group, "pre_forward", partial(self._call, PRE_FORWARD if first else "", index))
            on(group, "post_forward", partial(self._call, POST_FORWARD if last else "", index))
            on(group, "post_backward", partial(self._post_backward, first, index))
            on(group, "unshard", partial(self._call, "", index))
            on(group, "wait_for_unshard", partial(self._copy_out, index, place))
            for name, timed in (("_all_gather_comm", TimedGather), ("_reduce_scatter_comm", TimedReduce)):
                make = partial(timed, recorder=self, layer=layer, index=place)
                self._undo.append(_torch.replace(group, name, make))

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Call ``function(method, ...)`` in place of a method."""

        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: (method if self.stopped else partial(function, method))(*args, **kwargs)

        self._undo.append(_torch.replace(owner, name, around))

    def _enter(self) -> None:
        if self._inside == 0 and self._left is not None:
            self._gap.append((self._left, self.clock.now()))
        self._inside += 1

    def _leave(self) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._left = self.clock.now()

    def _note(self, what: str, index: int = -1, complete: bool = True) -> None:
        if what and self.recording:
            self._calls.append((what, index, self._gap, complete))
            if len(self._calls) > MOST_CALLS:
                self._forget()
                self.recording = False
        if what:
            self._gap = []

    def _call(self, what: str, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter()
        try:
            self._note(what, index)
            return method(*args, **kwargs)
        finally:
            self._leave()

    def _begin(self, index: int, method: Callable[..., Any], *args: Any) -> Any:
        """Start recording if the outermost forward begins, and not one inside another forward."""
        outermost = not _torch.forward_under_way(self.layers[index].state)
        if outermost and not _torch.in_backward():
            self.recording = torch.is_grad_enabled() and not self.stopped
            if self.recording and self._calls and self._is_over_or_broken():
                self._forget()
            self._inside, self._left = 0, None
        if outermost:
            self.root = index
            self.watched = self.watched if _torch.in_backward() else index
        return self._call(BEGIN if outermost else "", -1, method, *args)

    def _pre_backward(self, index: int, method: Callable[..., Any], *args: Any) -> Any:
        self.recording = bool(self._calls) and not self.stopped  # a forward without gradients may have come between
        return self._call(PRE_BACKWARD, index, method, *args)

    def _is_over_or_broken(self) -> bool:
        """True if a forward that begins now belongs to another step than the recorded calls."""
        whats = [what for what, *_ in self._calls]
        return whats[-1] != END_FORWARD or PRE_BACKWARD in whats

    def _forget(self) -> None:
        self._calls, self._gap = [], []
        for layer in self.layers:
            layer.reduced = 0
            for spans in (layer.gather, layer.copy_out, layer.copy_in, layer.reduce):
                spans.clear()

    def _end_forward(self, index: int, *unused: Any) -> None:
        if index == self.root:
            self._call(END_FORWARD, -1, lambda: None)

    def _copy_out(self, index: int, place: int, method: Callable[..., Any]) -> None:
        layer = self.layers[index]
        result = _torch.pending_gather(layer.groups[place])
        if result is None:
            self._call("", index, method)
            return
        self._enter()
        try:
            if self._inside == 1:  # not called by one of the recorded hooks of torch, but by a checkpoint or the user
                self._note(UNSHARD if place == 0 else "", index)
            _torch.wait_for_gather(result)  # so that the time of the copy does not include the wait
            start = self.clock.now()
            method()
            if self.recording:
                layer.copy_out[place].append((start, self.clock.now()))
        finally:
            self._leave()

    def _post_backward(self, last: bool, index: int, method: Callable[..., Any], *unused: Any) -> None:
        """Record the end of a module's backward. ``last`` is set for its first group, whose backward ends last."""
        layer = self.layers[index]
        self._enter()
        try:
            place = len(self._calls)
            self._note(POST_BACKWARD if last else "", index)
            method()
            if last and len(self._calls) > place:
                reduced = sum(map(len, layer.reduce.values()))
                what, _, gap, _ = self._calls[place]
                self._calls[place] = (what, index, gap, reduced > layer.reduced)
                layer.reduced = reduced
        finally:
            self._leave()

    def _end_backward(self, state: Any, method: Callable[..., Any]) -> None:
        self._enter()
        try:
            method()
        finally:
            self._leave()
        last = _torch.is_last_backward(state)
        self._note(END_BACKWARD, complete=last)
        reduces = any(group.reduce_grads for layer in self.layers for group in layer.groups)
        if last and reduces and self.recording:
            if self._skip:
                self._skip -= 1
                self._skipped()
                return
            self.stop()
            self._done(self._trace())

    def _trace(self) -> Trace:
        self.clock.settle()
        calls = [
            Call(what, layer, sum(self.clock.between(*span) for span in gap), complete)
            for what, layer, gap, complete in self._calls
        ]
        return Trace(tuple(map(self._layer, self.layers)), tuple(calls))

    def _layer(self, seen: Seen) -> Layer:
        gather, copy_out, copy_in, reduce = (
            sum(fmean(self.clock.between(*span) for span in each) for each in spans.values())
            for spans in (seen.gather, seen.copy_out, seen.copy_in, seen.reduce)
        )
        groups = seen.groups
        return Layer(
            seen.name,
            sum(seen.nbytes.values()),
            gather,
            copy_out,
            copy_in,
            reduce,
            reshards=any(_torch.reshards(group) for group in groups),
            reshards_after_backward=any(group.reshard_after_backward for group in groups),
            gathers_in_backward=any(group.unshard_in_backward for group in groups),
            has_parameters=bool(groups),
        )
