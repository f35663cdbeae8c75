"""The runtime, which runs a schedule on the stages of a rank, step after step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime import backend_of
from ...settings import current
from ..action import BACKWARDS
from ..schedule import Schedule
from .clip import clip_together
from .complete import complete, forwards
from .microbatches import Chunks
from .record import Record
from .stage import Stage
from .step_run import StepRun
from .step_runner import TRANSPORTS, Mode, StepRunner
from .tied import TiedParameters


class PipelineRuntime:
    """Runs a schedule on the stages of this rank.

    Collective: every rank of the group creates a runtime with the same arguments, and all ranks run the same steps.
    With the stages as one model, a step does this in plain PyTorch::

        for x, y in zip(args.tensor_split(m), target.tensor_split(m)):
            (loss(model(x), y) / m).backward()

    Args:
        stages: the stages that the schedule places on this rank. Each is a module that accepts tensors and returns a
            tensor or a tuple of tensors. The last stage of a pipeline may return anything.
        schedule: a `Schedule`, of compute alone or with its messages, or the name of a generator.
        microbatches: the number of microbatches, if ``schedule`` is a name; by default two for each rank.
        group: the ranks of the pipeline, in their order; by default all ranks.
        loss: ``loss(result, target)`` is called for each microbatch and returns a tensor of one number. Without a loss,
            `step` runs forwards alone.
        scale_gradients: True computes the gradients of the mean of the microbatches' losses, False those of the sum.
        chunk_args, chunk_kwargs, merge_output: how batches are cut and results are merged, as ``args_chunk_spec``,
            ``kwargs_chunk_spec`` and ``output_merge_spec`` of torch's schedules; by default along dimension 0.
        tied: parameters that several stages share. Each is a list of (stage, name in its module). All copies start
            with the value of the lowest stage's copy, and each gets the sum of the gradients of all copies. All copies
            are frozen, or none. Lists that share a copy count as one.
        transport: "symmetric" puts messages into symmetric memory. They must then have the same shapes in every step.
            "c10d" sends them by torch.distributed, in any shape. None uses "symmetric" if the ranks can reach each
            other's memory, and otherwise "c10d".
        device: the device of the values that stages pass on; by default that of the stages' parameters. If it is given,
            parameters may be on "meta" until the first step.

    Attributes:
        schedule: the schedule that it runs, with its messages.
        record: a `Record` of when the actions of the following steps run, or None.

    Raises:
        ValueError: there is no process group, `verify` finds a problem in the schedule, the stages are not those that
            the schedule places on this rank, or there is a loss but no backward.
        TypeError: a stage is not a `Stage`, or the schedule is neither a `Schedule` nor a name.
    """

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        schedule: Schedule | str,
        *,
        microbatches: int | None = None,
        group: dist.ProcessGroup | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        scale_gradients: bool = True,
        chunk_args: Any = None,
        chunk_kwargs: Any = None,
        merge_output: Any = None,
        tied: Sequence[Sequence[tuple[int, str]]] = (),
        transport: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if transport is not None and transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}: it must be one of {', '.join(map(repr, TRANSPORTS))}")
        found = group or dist.group.WORLD
        if found is None:
            raise ValueError("there is no process group: call torch.distributed.init_process_group first")
        rank, world = dist.get_rank(found), dist.get_world_size(found)
        mine = [stages] if isinstance(stages, Stage) else list(stages)
        for stage in mine:
            if not isinstance(stage, Stage):
                raise TypeError(f"a stage is a {type(stage).__name__}: wrap the module in Stage(module, index)")
        self.schedule = complete(schedule, world, len(mine), microbatches)
        _require_stages(self.schedule, rank, [stage.index for stage in mine])
        if loss is not None and self.schedule.kinds.isdisjoint(BACKWARDS):
            raise ValueError("there is a loss, but the schedule has no backwards: it would train nothing")
        self._stages = {stage.index: stage for stage in mine}
        self._device = _device_of(mine, None if device is None else torch.device(device))
        self._loss = loss
        self._scale = 1 / self.schedule.microbatches if scale_gradients else 1.0
        self._chunks = Chunks(self.schedule.microbatches, chunk_args, chunk_kwargs, merge_output)
        self._group, self._tied = found, TiedParameters(self.schedule, self._stages, tied, rank)
        self._step_runner = StepRunner(found, self._device, self._tied, transport)
        self._modes: dict[bool, Mode] = {}
        self._have_memory = False  # True once no parameter is on "meta"
        self._has_last = any(self.schedule.next_stage(index) is None for index in self._stages)
        self.record: Record | None = None

    def describe_batches(self, text: str) -> None:
        """Let the first step of each kind compare this text with that of the other ranks, and fail if it differs."""
        self._step_runner.batches = text

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch, and add the gradients to those of the stages' parameters.

        Args:
            args: the arguments of the model. They are used on the ranks of first stages.
            target: the target of the loss. It is used on the ranks of last stages.
            losses: on the ranks of last stages, this list is emptied and filled with the losses of the microbatches.
            return_outputs: True keeps and returns what the microbatches return.
            kwargs: keyword arguments for every stage of this rank. Tensors are cut like ``args``.

        Returns:
            On the ranks of last stages, the merged outputs of the model, without graph. None on all other ranks.

        Raises:
            ValueError, TypeError: the batch cannot be cut, a stage returned a value that cannot be sent, the loss is
                not a tensor of one number, or only some copies of a tied parameter are frozen.
            RuntimeError: gradients are disabled (call `eval` instead), the loss does not depend on any parameter, or a
                parameter is on the device "meta".
            torch.distributed.DistBackendError: another rank has failed, has died or did not come in time.
        """
        return self._run(self._loss is not None, args, kwargs, target, losses, return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run forwards alone, without gradients. If there is a target, the losses are computed. See `step`."""
        return self._run(False, args, kwargs, target, losses, return_outputs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Clip the gradients of all ranks by the norm of all of them.

        Collective over the pipeline's group. With the stages as one model, this is equivalent to::

            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)

        A tied parameter counts once. A gradient that is a DTensor, such as FSDP's, counts whole. Parts that are shared
        in another way, by tensors that are not DTensors, count as they are.

        Args:
            max_norm: the largest norm that is left as it is. Larger gradients are scaled down to it, in place.
            norm_type: the p of the p-norm, above 0, or ``"inf"``.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error.
            foreach: see torch's function.

        Returns:
            The norm before clipping, in float64 and without dimensions, equal on all ranks.

        Raises:
            ValueError: ``norm_type`` is not above 0.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set; or another rank could not compute
                its norm. (On GPUs, the norm is infinite in that case, as nothing waits for its value.)
        """
        own = {id(each): each for stage in self._stages.values() for each in stage.module.parameters()}
        elsewhere = self._tied.counted_elsewhere()
        counted = [each for key, each in own.items() if key not in elsewhere]
        return clip_together(
            list(own.values()), counted, max_norm, norm_type, error_if_nonfinite, foreach, self._group, self._device
        )

    def _run(
        self,
        backward: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Tensor] | None,
        return_outputs: bool,
    ) -> Any:
        if current().needs is not None:
            raise RuntimeError(
                "a pipeline step cannot run inside symm_overlap.prepare(): its first step allocates what all steps need"
            )
        mode = self._mode(backward)
        loss = self._loss if backward or target is not None else None

        def prepared() -> StepRun:
            # This runs in the step and not before it, so that the others do not wait for a rank that fails here.
            if not self._have_memory:
                _require_memory(self._stages.values())
                self._have_memory = True
            for stage in self._stages.values():
                stage.begin()
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses is a {type(losses).__name__}: it must be a list, which the step fills")
            if backward and not torch.is_grad_enabled():
                raise RuntimeError("PipelineRuntime.step computes gradients, which are disabled here: call eval()")
            batch = self._chunks.split(args, kwargs, target)
            return StepRun(
                mode.schedule,
                self._stages,
                batch,
                loss=loss,
                scale=self._scale,
                merge=self._chunks.merged if return_outputs else None,
                backward=backward,
                device=self._device,
                record=self.record,
            )

        try:
            run = self._step_runner.run(mode, prepared)
        except BaseException:
            for stage in self._stages.values():
                stage.clear()
            raise
        if losses is not None and self._has_last:
            losses[:] = [run.losses[each] for each in sorted(run.losses)]
        return run.result

    def _mode(self, backward: bool) -> Mode:
        """Return what all steps with a backward, or all without, have in common. It is created at the first of them."""
        if backward not in self._modes:
            schedule = self.schedule if backward else forwards(self.schedule)
            self._modes[backward] = self._step_runner.mode_of(schedule, backward)
        return self._modes[backward]


def _require_stages(schedule: Schedule, rank: int, found: list[int]) -> None:
    expected = list(schedule.stages_of_ranks[rank])
    if sorted(found) != expected:
        raise ValueError(f"the schedule places stages {expected} on rank {rank}, and it was given {sorted(found)}")


def _device_of(stages: Sequence[Stage], given: torch.device | None) -> torch.device:
    """Return the device that was given, or that of the stages' parameters and buffers.

    Raises:
        ValueError: no device was given, and the tensors are on several devices, or one of them is on "meta".
    """
    tensors = [each for stage in stages for _, each in _tensors(stage)]
    if given is None and any(each.is_meta for each in tensors):
        raise ValueError(
            "the stages have parameters on the device 'meta': give device=, and give them memory before the first step"
        )
    devices = {each.device for each in tensors}
    if given is None and len(devices) > 1:
        raise ValueError(f"the stages of this rank have parameters on {sorted(map(str, devices))}: give device=")
    device = given or (devices.pop() if devices else torch.device("cpu"))
    return backend_of(device.type).resolve(device)


def _require_memory(stages: Iterable[Stage]) -> None:
    for stage in stages:
        for name, each in _tensors(stage):
            if each.is_meta:
                raise RuntimeError(
                    f"{name} of stage {stage.index} is on the device 'meta': give it memory before the first step, as "
                    "to_empty does, and values"
                )


def _tensors(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a stage, with their names."""
    yield from stage.module.named_parameters()
    yield from stage.module.named_buffers()
