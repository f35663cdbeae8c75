"""One step of a pipeline on one rank: the functions that run the actions of its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...plan import Step, Table
from ..action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
)
from ..schedule import Schedule
from ._torch import tree_flatten, tree_map
from .message import Message, described, gradients_of
from .record import Record
from .sendable import apart, sendable, short
from .stage import Stage
from .transport import Transport

Key = tuple[int, int]
"""(stage, microbatch)."""


class StepBatch(NamedTuple):
    """What the caller passes to a step, by microbatch.

    Attributes:
        args: the arguments of the first stages.
        kwargs: the keyword arguments of every stage of this rank.
        targets: the targets of the loss.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any]


class StepRun:
    """One step: the values that actions pass to each other, and a function for each kind of action.

    Args:
        schedule: the schedule, with its messages.
        stages: the stages of this rank.
        batch: the microbatches of the caller.
        loss: computes the loss of a microbatch from its result and its target; None if there is no loss.
        scale: the gradient of each of these losses.
        merge: merges the results of the microbatches; None if the caller does not want them.
        backward: True if the schedule has backwards.
        device: the device of the messages.
        record: records when each action runs, unless it is None.

    Attributes:
        transport: carries the messages. It is set before the actions run.
        results: the results of the last stages, by microbatch, until `conclude` merges them into ``result``.
        losses: the losses of the last stages, by microbatch.
        messages: for each (stage, microbatch) run here that has a next stage, what the stage passes on.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        batch: StepBatch,
        *,
        loss: Callable[[Any, Any], Tensor] | None,
        scale: float,
        merge: Callable[[Sequence[Any]], Any] | None,
        backward: bool,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        self._schedule, self._stages, self._batch = schedule, stages, batch
        self._loss, self._scale, self._backward = loss, scale, backward
        self._device, self._merge, self._record = device, merge, record
        self.transport: Transport
        self.results: dict[int, Any] = {}
        self.result: Any = None
        self.losses: dict[int, Tensor] = {}
        self.messages: dict[Key, Message] = {}
        self._received: dict[Key, Message] = {}  # what the inputs of a forward are
        self._inputs: dict[Key, Sequence[Tensor]] = {}
        self._outputs: dict[Key, Sequence[Tensor]] = {}
        self._output_gradients: dict[Key, Sequence[Tensor]] = {}  # only of the differentiable values
        self._input_gradients: dict[Key, Sequence[Tensor]] = {}

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the caller will read, as far as the device can fill them: results, losses, and gradients of
        parameters.
        """
        results = tree_flatten(self.result)[0]
        parameters = (each for stage in self._stages.values() for each in stage.module.parameters())
        gradients = (each.grad for each in parameters if each.grad is not None)
        found = [each for each in (*results, *self.losses.values(), *gradients) if isinstance(each, Tensor)]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in found]
        return [each for each in local if each.device == self._device and _is_dense(each)]

    def table(self) -> Table:
        """Return the function of each kind of action."""
        functions: Table = {
            FORWARD: lambda step: self._forward(*_chunk(step)),
            FULL_BACKWARD: lambda step: self._run_backward(*_chunk(step), split=False),
            BACKWARD_INPUT: lambda step: self._run_backward(*_chunk(step), split=True),
            BACKWARD_WEIGHT: lambda step: self._run_backward_weight(*_chunk(step)),
            SEND_F: self._send_activation,
            SEND_B: self._send_gradient,
            RECV_F: self._receive_activation,
            RECV_B: self._receive_gradient,
            UNSHARD: lambda step: self._stage_of(step).unshard(),
            RESHARD: lambda step: self._stage_of(step).reshard(),
            REDUCE_GRAD: lambda step: self._stage_of(step).reduce_grad(),
        }
        if self._record is not None:
            functions = self._record.timed(functions, self._device)
        return {**functions, OVERLAP_F_B: lambda step: _compound(step, functions)}

    def conclude(self) -> None:
        """Merge the results after all actions. This is part of the step: if it fails, the step has failed."""
        if self._merge is not None and self.results:
            self.result = self._merge([self.results.pop(each) for each in sorted(self.results)])

    def _stage_of(self, step: Step) -> Stage:
        return self._stages[_action(step.label).stage]

    def _send_activation(self, step: Step) -> None:
        key = _chunk(step)
        # The gradients that come back are those of the message as the receiver knows it.
        self.messages[key] = self.transport.send(step, self.messages[key], self._outputs.pop(key))

    def _send_gradient(self, step: Step) -> None:
        key = _chunk(step)
        self.transport.send(step, gradients_of(self._received.pop(key)), self._input_gradients.pop(key))

    def _receive_activation(self, step: Step) -> None:
        message, tensors = self.transport.receive(step)
        for value, tensor in zip(message, tensors, strict=True):
            tensor.requires_grad_(value.differentiable and self._backward)
        self._inputs[_chunk(step)] = tensors
        self._received[_chunk(step)] = message

    def _receive_gradient(self, step: Step) -> None:
        _, tensors = self.transport.receive(step)
        self._output_gradients[_chunk(step)] = tensors

    def _forward(self, index: int, microbatch: int) -> None:
        key, stage = (index, microbatch), self._stages[index]
        first = self._schedule.previous_stage(index) is None
        args = self._batch.args[microbatch] if first else tuple(self._inputs.pop(key))
        with self._grad_mode():
            output = stage.forward(microbatch, args, self._batch.kwargs[microbatch], keep=self._backward)
            next_stage = self._schedule.next_stage(index)
            if next_stage is None:
                self._end(stage, microbatch, output)
                return
        tensors = sendable(index, output, self._device)
        message = self.messages[key] = described(tensors)
        if not self._backward:
            message = self.messages[key] = tuple(value._replace(differentiable=False) for value in message)
        tensors = apart(tensors, stage.module)
        if next_stage in self._stages:
            for value, tensor in zip(message, tensors, strict=True):
                tensor.requires_grad_(value.differentiable)
            self._inputs[next_stage, microbatch] = tensors
            self._received[next_stage, microbatch] = message
        else:
            self._outputs[key] = tensors

    def _grad_mode(self) -> AbstractContextManager[object]:
        return torch.enable_grad() if self._backward else torch.no_grad()

    def _end(self, stage: Stage, microbatch: int, output: Any) -> None:
        """Finish a microbatch at the end of a pipeline: keep its result, and compute its loss."""
        if self._merge is not None:
            self.results[microbatch] = tree_map(_detached, output)  # its graph would keep the activations alive
        if self._loss is None:
            return
        target = self._batch.targets[microbatch]
        try:
            loss = self._loss(output, target)
        except Exception as error:
            if target is not None:
                raise
            raise TypeError(f"the loss failed, perhaps because the step got no target=: {error}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            raise TypeError(
                f"the loss of microbatch {microbatch} is {short(loss)}: it must be a tensor of one real number"
            )
        self.losses[microbatch] = loss.detach()
        if self._backward:
            if not loss.requires_grad:
                raise RuntimeError(f"the loss of microbatch {microbatch} does not depend on any parameter")
            stage.replace_outputs(microbatch, (loss,))

    def _run_backward(self, index: int, microbatch: int, *, split: bool) -> None:
        key, stage = (index, microbatch), self._stages[index]
        run = stage.backward_input if split else stage.backward
        self._hand_back(key, run(microbatch, self._gradients(key)))

    def _run_backward_weight(self, index: int, microbatch: int) -> None:
        self._stages[index].backward_weight(microbatch)

    def _gradients(self, key: Key) -> list[Tensor | None]:
        """Return the gradients of a stage's outputs, or of the loss."""
        if self._schedule.next_stage(key[0]) is None:
            loss = self.losses[key[1]]
            return [torch.full_like(loss, self._scale)]
        left = iter(self._output_gradients.pop(key))
        return [next(left) if value.differentiable else None for value in self.messages[key]]

    def _hand_back(self, key: Key, gradients: Sequence[Tensor | None]) -> None:
        """Pass the gradients of a stage's inputs to the previous stage, or to the caller's tensors."""
        index, microbatch = key
        previous = self._schedule.previous_stage(index)
        if previous is None:
            for arg, gradient in zip(tree_flatten(self._batch.args[microbatch])[0], gradients, strict=True):
                if isinstance(arg, Tensor) and arg.requires_grad and gradient is not None:
                    torch.autograd.backward(arg, gradient)
            return
        message = self._received[key]
        found = [
            # An input that the stage did not use gets a gradient of zeros: the sender's graph expects one.
            torch.zeros(value.shape, dtype=value.dtype, device=self._device) if gradient is None else gradient
            for value, gradient in zip(message, gradients, strict=True)
            if value.differentiable
        ]
        if previous in self._stages:
            self._output_gradients[previous, microbatch] = found
        else:
            self._input_gradients[key] = found


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _compound(step: Step, functions: Table) -> None:
    """Run the parts one after the other, each as an action of its own."""
    for part in _action(step.label).parts:
        assert part.microbatch is not None
        functions[part.kind](Step(part.kind, step.stream, chunk=(part.stage, part.microbatch)))


def _chunk(step: Step) -> Key:
    assert step.chunk is not None
    return step.chunk


@lru_cache(maxsize=4096)
def _action(label: str) -> Action:
    return Action.parse(label)


def _is_dense(tensor: Tensor) -> bool:
    """True if a tensor's elements fill its memory without gaps, each once. Sparse tensors do not count."""
    if tensor.layout != torch.strided:
        return False
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()
