"""Let gathers wait for the optimizer, and not for other work that was queued on the stream after it."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import _torch


class PostOptimizerEvent:
    """The handle that `post_optimizer_event` returns. ``remove()`` or the end of a ``with`` block ends its effect."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], model: nn.Module, roots: list[FSDPModule]) -> None:
        self._roots = roots
        self._device = torch.get_device_module(_torch.device_of(_torch.state_of(roots[0])))
        self._handles: list[Any] = [each.register_step_post_hook(self._stepped) for each in optimizers]
        self._handles.append(model.register_load_state_dict_post_hook(lambda module, keys: self.record()))

    def record(self) -> None:
        """Make the gathers of the next forward wait for all work that is queued on the current stream so far.

        It is called after each step of an optimizer, and after a state dict was loaded. Call it yourself if you change
        parameters in another way between the optimizer's step and the next forward.
        """
        for root in self._roots:
            stream = self._device.current_stream()
            waiting = _torch.has_post_optim_event(root)
            if waiting is not None:  # of another optimizer, perhaps on another stream: the new event comes after it
                stream.wait_event(waiting)
            event = self._device.Event()
            event.record(stream)
            root.set_post_optim_event(event)

    def remove(self) -> None:
        """Make gathers wait again for all work that is queued on the current stream. May be called twice."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for root in self._roots:
                _torch.forget_post_optim_event(root)
        self._handles.clear()

    def __enter__(self) -> PostOptimizerEvent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def _stepped(self, *unused: Any) -> None:
        self.record()


def post_optimizer_event(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], model: nn.Module
) -> PostOptimizerEvent:
    """Make the first gathers of a step wait for the optimizer only.

    By default torch makes them wait for all work that was queued on the current stream before the forward. That
    includes work that does not touch parameters, such as metrics or copying the next batch. Equivalent, after every
    ``optimizer.step()``, to ::

        model.set_post_optim_event(torch.cuda.current_stream().record_event())

    With several optimizers, the event comes after the steps of all of them, whatever streams they ran on. Torch uses an
    event once: a forward without an optimizer step before it, as in gradient accumulation, waits for the current stream
    as before.

    Args:
        optimizer: one or several optimizers of the model's parameters.
        model: a module to which ``fully_shard`` was applied, or one that contains such modules.

    Returns:
        A handle; ``remove()`` ends its effect.

    Raises:
        ValueError: nothing in the model is sharded by FSDP2, or there is no optimizer.
        TypeError: ``optimizer`` is or contains something that is not an optimizer, or that accepts no hooks.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    wrong = [each for each in optimizers if not isinstance(each, torch.optim.Optimizer)]
    if wrong:
        raise TypeError(f"post_optimizer_event: {type(wrong[0]).__name__} is not a torch.optim.Optimizer")
    hollow = [each for each in optimizers if not hasattr(each, "_optimizer_step_post_hooks")]
    if hollow:  # a subclass that does not call Optimizer.__init__, as in Hugging Face's accelerate
        raise TypeError(
            f"post_optimizer_event: {type(hollow[0]).__name__} accepts no hooks. If it wraps another optimizer, "
            "pass that one (in accelerate: optimizer.optimizer)"
        )
    roots = _torch.outermost(model)
    if not optimizers or not roots:
        missing = "no optimizer was given" if roots else "nothing in the model is sharded: apply fully_shard first"
        raise ValueError(f"post_optimizer_event: {missing}")
    return PostOptimizerEvent(optimizers, model, roots)
