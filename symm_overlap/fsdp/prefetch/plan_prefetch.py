"""Planned prefetch: record one training step, then choose which layers each layer gathers ahead."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import _torch
from .agreement import agreed
from .issue_order import DEFAULT
from .lists import counts_of, lists, starts_of
from .policy import Auto, Policy, policy_of
from .recorder import Recorder
from .search import Predicted, predict, search
from .step_plan import Options
from .trace import END_FORWARD, POST_FORWARD, Trace

_plans: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PrefetchPlan]] = weakref.WeakKeyDictionary()
"""The plan of each model that has one. The hooks on the model keep the plan alive."""


class PrefetchPlan:
    """The plan that `plan_prefetch` returns. ``print`` shows it.

    Attributes:
        policy: the policy that was passed.
        status: "recording" until a training step has been recorded; then "planned", or "left to torch" for the reason
            in ``note``; "reset" after `reset`.
        note: why prefetching was left to torch, or that modules have run in another order since; empty otherwise.
        trace: what was recorded, with the times of the slowest rank.
        options: how the model communicates, as far as a prediction depends on it.
        prefetch: which layers each layer of the trace gathers ahead, by their index.
        default, predicted: what the simulator predicts for the step with torch's own prefetch, and with the planned
            one.
    """

    def __init__(self, model: nn.Module, policy: Policy, verbose: bool) -> None:
        self.policy, self.status, self.note = policy, "recording", ""
        self.trace: Trace | None = None
        self.options = Options()
        self.prefetch = DEFAULT
        self.default: Predicted | None = None
        self.predicted: Predicted | None = None
        self._verbose = verbose
        self._before: list[tuple[Any, Any]] = []  # for each module, the lists that it had
        self._hooks: list[Callable[[], None]] = []
        self._forwards_before = 0  # the length of torch's list of forwards when the root's began
        # In the very first step torch initialises itself, which must not be part of the times.
        new = any(_torch.is_new(_torch.state_of(each)) for each in _torch.outermost(model))
        skip = int(new and isinstance(policy, Auto))
        self._recorder = Recorder(model, self._recorded, skip, self._skipped)
        self._layers = self._recorder.layers

    def reset(self) -> None:
        """Restore the prefetching that every module had before, and stop watching the model."""
        self._recorder.stop()
        for undo in self._hooks:
            undo()
        self._hooks.clear()
        for state, had in self._before:
            _torch.restore_prefetch_lists(state, had)
        if self._before:
            self._drop_unused()
        self._before.clear()
        self.status, self.note = "reset", ""

    def _recorded(self, trace: Trace) -> None:
        """Plan from a recorded step. All ranks call this at the end of its backward."""
        self.options = self._options()
        found = agreed(trace, str(self.policy), str(self.options), self._groups())
        found = self._recorder.why_no_gather() or found
        if isinstance(found, str):
            self._leave_to_torch(found)
            return
        self.trace, self.status = found, "planned"
        starts = starts_of(found)
        if isinstance(self.policy, Auto):
            self.prefetch = search(found, self.policy.cap, self.options)
        else:
            self.prefetch = lists(found, starts, counts_of(found, starts, self.policy))
        self.default, self.predicted = (predict(found, each, self.options) for each in (DEFAULT, self.prefetch))
        self._set()
        self._watch_order(found)
        if self._verbose and self._speaks():
            print(self, file=sys.stderr, flush=True)

    def _skipped(self) -> None:
        """Check after a step that is not recorded whether all ranks skip it: with another policy they would not."""
        found = agreed(Trace((), ()), str(self.policy), str(self._options()), self._groups())
        if isinstance(found, str):
            self._recorder.stop()
            self._leave_to_torch(found)

    def _leave_to_torch(self, why: str) -> None:
        self.status, self.note = "left to torch", why
        warnings.warn(f"symm_overlap: prefetching is left to torch: {why}", stacklevel=3)

    def _options(self) -> Options:
        """See the class."""
        groups = [group for layer in self._layers for group in layer.groups if _torch.has_peers(group)]
        return Options(
            one_communicator=all(map(_torch.one_communicator, groups)),
            reduce_inputs=max(map(_torch.buffers_of_reductions, groups), default=1),
        )

    def _groups(self) -> Iterator[dist.ProcessGroup]:
        """Yield the groups of all dimensions of the meshes on which there are parameters, each once."""
        seen = set()
        for layer in self._layers:
            for group in layer.groups:
                for each in _torch.mesh_of(group).get_all_groups():
                    if each.group_name not in seen:
                        seen.add(each.group_name)
                        yield each

    def _speaks(self) -> bool:
        """True if this rank is the first of the ranks that share the parameters."""
        return all(group.rank() == 0 for group in self._groups())

    def _set(self) -> None:
        for index, layer in enumerate(self._layers):
            module = cast(FSDPModule, layer.module)
            self._before.append((layer.state, _torch.prefetch_lists(layer.state)))
            module.set_modules_to_forward_prefetch(self._modules(self.prefetch.after(index, forward=True)))
            module.set_modules_to_backward_prefetch(self._modules(self.prefetch.after(index, forward=False)))
        lists = [*self.prefetch.forward, *self.prefetch.backward]
        for layer in self._layers:
            for group in layer.groups:
                _torch.reserve_gathers(group, max(map(len, lists), default=0))

    def _modules(self, indices: tuple[int, ...]) -> list[FSDPModule]:
        return [cast(FSDPModule, self._layers[index].module) for index in indices]

    def _watch_order(self, trace: Trace) -> None:
        """Register hooks that check the order of modules at the end of each forward of the outermost module."""
        root = self._layers[self._recorder.watched]
        expected: list[list[int]] = []  # of each forward of the step
        ran: list[int] = []
        for call in trace.calls:
            if call.what == POST_FORWARD:
                ran.append(call.layer)
            elif call.what == END_FORWARD:
                expected.append(ran)
                ran = []

        def register(layer: Any, function: Callable[..., None]) -> None:
            hook = torch.compiler.disable(function)
            self._hooks.append(layer.module.register_forward_pre_hook(hook, prepend=True).remove)

        for layer in self._layers:  # any of them may be called on its own
            register(layer, partial(self._forward_begins, layer.state))
        register(root, partial(self._count_forwards, root.state))
        ends = torch.compiler.disable(partial(self._forward_ends, root.state, expected))
        self._hooks.append(root.module.register_forward_hook(ends).remove)

    def _forward_begins(self, state: Any, *unused: Any) -> None:
        """Free gathered outputs of an earlier forward, such as one that raised. Parameters may have changed since."""
        if not _torch.in_backward() and _torch.is_outermost_now(state):
            self._drop_unused()

    def _count_forwards(self, state: Any, *unused: Any) -> None:
        if not _torch.in_backward():
            self._forwards_before = len(_torch.forward_order(state))

    def _forward_ends(self, state: Any, expected: list[list[int]], *unused: Any) -> None:
        """Check the order of the modules that ran, and free gathered outputs that were not used."""
        if _torch.in_backward():
            return
        if not torch.is_grad_enabled():
            self._drop_unused()  # else the backward may still use it
        of_group = {id(layer.groups[-1]): index for index, layer in enumerate(self._layers) if layer.groups}
        ran = [of_group.get(id(group)) for group in _torch.forward_order(state)[self._forwards_before :]]
        ran = [index for index in ran if index is not None]
        if ran not in expected and not self.note:
            wanted = expected[0]
            place = next((i for i, pair in enumerate(zip(ran, wanted, strict=False)) if pair[0] != pair[1]), None)
            self.note = "modules ran in another order than in the step that was planned: " + (
                f"{len(ran)} forwards where there were {len(wanted)}"
                if place is None
                else f"{self._name(ran[place])} where {self._name(wanted[place])} was expected"
            )
            text = "the results are right, but gathers may be early or late. reset() the plan, or plan again"
            warnings.warn(f"symm_overlap: {self.note}; {text}", stacklevel=2)

    def _drop_unused(self) -> None:
        """Free the gathered outputs of modules that did not run."""
        for layer in self._layers:
            for group in layer.groups:
                _torch.drop_unused_gather(group)

    def _name(self, index: int | None) -> str:
        return "the model" if index is None or not self._layers[index].name else self._layers[index].name

    def __str__(self) -> str:
        head = f"prefetch {self.policy}: {self.status}"
        if self.trace is None or self.default is None or self.predicted is None:
            return f"{head}: {self.note}" if self.note else head
        now, before = self.predicted, self.default
        lines = [
            head,
            f"predicted step {now.step:.3f} ms, with torch's default {before.step:.3f} ms",
            f"part of it without computation {now.exposed:.3f} ms, with torch's default {before.exposed:.3f} ms",
            f"peak of gathered and unsharded parameters {now.memory} bytes, with torch's default {before.memory} bytes",
        ]
        for index, layer in enumerate(self.trace.layers):
            forward, backward = (self.prefetch.after(index, forward=each) for each in (True, False))
            lines.append(
                f"{layer.name or 'the model'}: forward {self._names(forward)}; backward {self._names(backward, index)}"
            )
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _names(self, ahead: tuple[int, ...], own: int = -1) -> str:
        if ahead == (own,):
            return "nothing"
        return ", ".join(self._name(index) for index in ahead) or "torch's default"


def plan_prefetch(model: nn.Module, policy: Policy | str = "auto", *, verbose: bool = True) -> PrefetchPlan:
    """Plan which parameters FSDP2 gathers ahead of their use.

    The call records the next training step with the prefetching that is set now: the order in which modules run forward
    and backward, and how long they compute, gather and reduce. For "auto" it skips the very first step, in which torch
    initialises itself. At the end of the recorded backward, the ranks agree on what they recorded, and every module
    gets its lists. Equivalent to ::

        module.set_modules_to_forward_prefetch([...])   # for every module to which fully_shard was applied
        module.set_modules_to_backward_prefetch([...])

    Call it on every rank. If `symm_overlap.fsdp.apply` is used, call that first.

    If modules are later skipped, run twice or run in another order, they are gathered when they run, and one warning
    reports it.

    Args:
        model: a module to which ``fully_shard`` was applied, or one that contains exactly one outermost such module. An
            earlier plan of the model is reset.
        policy: "depth=2", "bytes=512MiB", "auto", or "auto=2GiB" with a cap on the memory of gathered parameters; or
            `Depth`, `Bytes`, `Auto`.
        verbose: whether one rank prints the plan to standard error when it is complete.

    Returns:
        The plan. ``reset()`` undoes it; ``print`` shows what was chosen and the predicted gain.

    Raises:
        ValueError: the policy is unknown, nothing in the model is sharded by FSDP2, the model has several outermost
            sharded modules, or it is itself part of a larger sharded module.
    """
    policy = policy_of(policy)
    roots = _torch.outermost(model)
    if not roots:
        raise ValueError("plan_prefetch: nothing in the model is sharded: apply fully_shard first")
    if len(roots) > 1:
        raise ValueError(
            f"plan_prefetch: the model has {len(roots)} sharded modules that are not inside another sharded module: "
            "apply fully_shard to the whole model too, or call plan_prefetch for each of them"
        )
    if _torch.is_inner(_torch.state_of(roots[0])):
        raise ValueError("plan_prefetch: the module is part of a larger one that FSDP2 shards: pass the larger one")
    earlier = _plans.pop(model, lambda: None)()
    if earlier is not None:
        earlier.reset()
    plan = PrefetchPlan(model, policy, verbose)
    _plans[model] = weakref.ref(plan)
    return plan
