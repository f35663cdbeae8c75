"""Run a `Schedule` on torch's ``PipelineStage``s, in torch's own runtime.

Torch's runtime accepts any table of actions and messages, but checks little, and a wrong table ends in a hang or in
wrong gradients. So the table is verified first, for messages as NCCL passes them. Tables that torch cannot run are
rejected:

- Two pipelines in one table (DualPipe), kinds of actions that the installed torch does not have, and tables without
  backwards.
- A last stage that does not run its forwards in the order of the microbatches. Torch stores losses and outputs in the
  order of the forwards, so it would confuse the loss of one microbatch with that of another.
- Stages with DDP of which torch would silently not reduce all gradients.

Torch divides gradients by the number of microbatches in REDUCE_GRAD, so this action is added to a lowered table that
does not have it. Torch 2.15 needs a wait for each send and each reduction, so these are added too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ._torch import SPLITS_SHARED_WEIGHTS, RuntimeOfTables, TorchKind, TorchRuntime, TorchStage
from .action import (
    AWAITED_SENDS,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BACKWARDS,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    FULL_BACKWARD,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_F,
    UNSHARD,
    WAIT_REDUCE_GRAD,
    WAIT_SEND_F,
    Action,
)
from .interop import to_torch
from .lowering import add_reduce_grad, add_send_recv, add_send_waits, defer_receives, lower
from .runtime._torch import ReplicatedByDdp, is_sharded
from .schedule import Schedule
from .verify import verify

_WITHOUT_BACKWARD = frozenset({FORWARD, SEND_F, RECV_F, WAIT_SEND_F, UNSHARD, RESHARD})
_TRANSPORT = "queued"
"""Torch starts sends and receives at once and waits later, and NCCL passes the messages of two ranks in one queue."""


def torch_schedule(
    schedule: Schedule,
    stages: TorchStage | Sequence[TorchStage],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    split: bool = SPLITS_SHARED_WEIGHTS,
    deferred: bool = False,
    **options: Any,
) -> TorchRuntime:
    """Return a schedule as an object of torch.distributed.pipelining, whose ``step`` and ``eval`` are torch's own.

    Args:
        schedule: a schedule of compute alone, which is lowered here, or one with its messages.
        stages: this rank's stages: those that ``schedule.placement`` places on it, as ``PipelineStage`` or as
            ``build_stage`` of a traced pipeline returns them. FSDP2 modules inside them keep their parameters from
            UNSHARD to RESHARD (``set_reshard_after_forward(False)``).
        loss_fn: ``loss_fn(output of the last stage, microbatch of the target)``. Without it there is no backward.
        split: True runs I and W separately. False runs a full backward in place of I, and nothing in place of W. The
            default is False before torch 2.13, where a split backward computes a wrong gradient for a weight that a
            stage uses twice.
        deferred: True receives as late as possible (`defer_receives`).
        options: of torch's constructor: ``args_chunk_spec``, ``kwargs_chunk_spec``, ``output_merge_spec``,
            ``scale_grads``.

    Returns:
        A runtime of torch, as ``_PipelineScheduleRuntime`` is.

    Raises:
        ValueError: the stages are not those of the schedule, `verify` finds a problem, or torch cannot run the schedule
            or would silently not reduce gradients (see the module).
        TypeError: the schedule is not a `Schedule`, or a stage is not one of torch's.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}: call symm_overlap.pipeline.generators.generate")
    given = list(stages) if isinstance(stages, Iterable) else [stages]
    for stage in given:
        if not isinstance(stage, TorchStage):
            raise TypeError(f"a stage is a {type(stage).__name__}: give torch's PipelineStage")
    found = sorted(given, key=lambda stage: stage.stage_index)
    lowered = _lowered(schedule if split else _unsplit(schedule), deferred)
    table = to_torch(lowered)  # first, so that an action that torch does not know is the first error reported
    _check_stages(schedule, found)
    if schedule.kinds.isdisjoint(BACKWARDS):
        raise ValueError("the schedule has no backwards, without which torch's runtime rejects it: use PipelineRuntime")
    verify(lowered, transport=_TRANSPORT).raise_for_problems()
    _check_order_of_losses(schedule)
    for stage in found if loss_fn is not None else ():
        _check_ddp(lowered, stage)
    for stage in found:
        _leave_freeing_to_the_schedule(stage)
    return RuntimeOfTables(
        found,
        schedule.microbatches,
        loss_fn,
        to_torch(_only(lowered, COMPUTE)),
        table,
        to_torch(_only(lowered, _WITHOUT_BACKWARD)),
        **options,
    )


def _only(schedule: Schedule, kinds: frozenset[str]) -> Schedule:
    """Return the schedule with the actions of these kinds only.

    If a compound is not among the kinds, it is replaced by those of its parts that are.
    """

    def kept(action: Action) -> tuple[Action, ...]:
        return (action,) if action.kind in kinds else tuple(part for part in action.parts if part.kind in kinds)

    rows = ([each for action in row if action is not None for each in kept(action)] for row in schedule.rows)
    return schedule.with_rows(rows)


def _unsplit(schedule: Schedule) -> Schedule:
    """Return the schedule with a B in place of every I, and without any W."""

    def whole(action: Action) -> Action:
        kind = FULL_BACKWARD if action.kind == BACKWARD_INPUT else action.kind
        return action._replace(kind=kind, parts=tuple(map(whole, action.parts)))

    return schedule.with_rows(
        [action and whole(action) for action in row if action is None or action.kind != BACKWARD_WEIGHT]
        for row in schedule.rows
    )


def _lowered(schedule: Schedule, deferred: bool) -> Schedule:
    """Return the schedule with all actions that torch's runtime needs, and without empty cells."""
    schedule = schedule.with_rows([action for action in row if action is not None] for row in schedule.rows)
    kinds = schedule.kinds
    waits = WAIT_SEND_F in {kind.value for kind in TorchKind}
    if kinds <= COMPUTE:
        return lower(schedule, waits=waits, deferred=deferred, transport=_TRANSPORT)
    if REDUCE_GRAD not in kinds:
        schedule = add_reduce_grad(schedule, "at once" if waits else "none")
    elif waits and WAIT_REDUCE_GRAD not in kinds:
        schedule = _with_reduce_waits(schedule)
    if kinds.isdisjoint(COMMUNICATION):
        schedule = add_send_recv(schedule)
    if waits and kinds.isdisjoint(AWAITED_SENDS):
        schedule = add_send_waits(schedule)
    return defer_receives(schedule, _TRANSPORT) if deferred else schedule


def _with_reduce_waits(schedule: Schedule) -> Schedule:
    """Return the schedule with a WAIT_REDUCE_GRAD directly after each REDUCE_GRAD."""

    def waited(action: Action) -> tuple[Action, ...]:
        return (action, action._replace(kind=WAIT_REDUCE_GRAD)) if action.kind == REDUCE_GRAD else (action,)

    return schedule.with_rows([each for action in row if action for each in waited(action)] for row in schedule.rows)


def _check_stages(schedule: Schedule, stages: list[TorchStage]) -> None:
    """Raise ValueError if the stages of this rank are not those of the schedule."""
    if not stages:
        raise ValueError("there are no stages: give those of this rank")
    first = stages[0]
    if (first.num_stages, first.group_size) != (schedule.stages, schedule.ranks):
        raise ValueError(
            f"the schedule has {schedule.stages} stages on {schedule.ranks} ranks, but the PipelineStages say that "
            f"there are {first.num_stages} on {first.group_size}"
        )
    expected, found = list(schedule.stages_of_ranks[first.group_rank]), [stage.stage_index for stage in stages]
    if found != expected:
        raise ValueError(
            f"rank {first.group_rank} has stages {expected} in the schedule, but was given PipelineStages {found}"
        )


def _leave_freeing_to_the_schedule(stage: TorchStage) -> None:
    """Keep FSDP2 modules inside a stage from freeing their parameters after each forward, before RESHARD.

    Torch 2.11 to 2.15 look up the parameters of a stage at I. They would find the sharded parameters, which are not in
    the graph, and would silently leave out their gradients.
    """
    for module in stage.submod.modules():
        if isinstance(module, FSDPModule) and is_sharded(module):
            module.set_reshard_after_forward(False, recurse=False)


def _check_ddp(schedule: Schedule, stage: TorchStage) -> None:
    """Raise ValueError if torch would silently leave gradients of DDP modules unreduced, or reduce them wrongly.

    Torch tells only a stage's own module, and no module inside it, which backward pass is the last. The hooks by which
    DDP reduces gradients are not called in a split backward. With a static graph, DDP reduces after the first backward.
    """
    own, advice = stage.submod, "use PipelineRuntime"
    if any(_reduces_by_ddp(module) for module in own.modules() if module is not own):
        why = "modules inside it are wrapped in DDP, and it does not know when these should reduce"
    elif not _reduces_by_ddp(own):
        return
    elif not isinstance(own, DistributedDataParallel):
        why, advice = "`replicate` was applied to it", "wrap it in DistributedDataParallel, or use PipelineRuntime"
    elif own.static_graph:
        why, advice = "DDP has static_graph=True", "leave it out"
    elif _splits(schedule, stage.stage_index):
        why, advice = "the schedule splits its backward", "give split=False, or use PipelineRuntime"
    else:
        return
    index = stage.stage_index
    raise ValueError(f"torch's runtime would not reduce gradients of stage {index}, because {why}: {advice}")


def _reduces_by_ddp(module: nn.Module) -> bool:
    """True if DDP reduces gradients of a module over several ranks."""
    if isinstance(module, DistributedDataParallel):
        return dist.get_world_size(module.process_group) > 1
    return isinstance(module, ReplicatedByDdp)


def _splits(schedule: Schedule, stage: int) -> bool:
    """True if a backward of this stage is split into I and W."""
    leaves = (leaf for row in schedule.rows for action in row if action is not None for leaf in action.leaves)
    return any(leaf.stage == stage and leaf.kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) for leaf in leaves)


def _check_order_of_losses(schedule: Schedule) -> None:
    """Raise ValueError if the forwards of the last stage are not in the order of the microbatches."""
    last = schedule.stages - 1
    row = schedule.rows[schedule.rank_of(last)]
    leaves = (leaf for action in row if action is not None for leaf in action.leaves)
    ran = [leaf.microbatch for leaf in leaves if (leaf.stage, leaf.kind) == (last, FORWARD)]
    for expected, microbatch in enumerate(ran):
        if microbatch != expected:
            raise ValueError(
                f"torch stores the losses of the last stage in the order of its forwards, so these must run as "
                f"microbatches 0, 1, 2, ...; but {last}F{microbatch} comes where {last}F{expected} should be"
            )
