"""The private APIs of torch.distributed.pipelining. Checked on torch 2.11.0, 2.13.0 and 2.15.0; the runtime on 2.11.0
and 2.13.0.

Only `interop` and `torch_runtime` import this file, because schedules alone need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action as TorchAction
from torch.distributed.pipelining.schedules import _ComputationType as TorchKind
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as TorchRuntime

__all__ = ["SPLITS_SHARED_WEIGHTS", "RuntimeOfTables", "TorchAction", "TorchKind", "TorchRuntime"]

SPLITS_SHARED_WEIGHTS = torch.__version__ >= "2.13"
"""True if I and W together compute the right gradient of a weight that a stage uses twice. Torch 2.11 does not."""

Table = dict[int, list[TorchAction | None]]


class RuntimeOfTables(TorchRuntime):
    """Torch's runtime, running tables that are passed to it.

    It has one table for steps with a backward and one for steps without. Torch's own runtime runs the actions of the
    backward in both cases. In a step without a backward it then fails at the turn of a V, and it divides gradients that
    were accumulated before.

    Args:
        stages: the stages of this rank, in ascending order.
        microbatches: how many microbatches a step has.
        loss_fn: the loss of the last stage's output and a microbatch of the target, or None.
        compute: the table of the compute actions alone.
        both: the table of all actions: compute, messages, and actions on parameters.
        forward: the part of ``both`` that a step without a backward needs.
        options: of torch's constructor.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        compute: Table,
        both: Table,
        forward: Table,
        **options: Any,
    ) -> None:
        super().__init__(stages, microbatches, loss_fn=loss_fn, **options)  # type: ignore[no-untyped-call]
        self.pipeline_order = compute
        self._prepare_schedule_with_comms(both, format="compute_comms")  # sets stage_index_to_group_rank too
        self._tables = {True: both, False: forward}
        for stage in stages:
            _open_no_connection_to_itself(stage)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        if self._has_backward and not self._stages_backward_initialized:
            # The receive buffers that eval has allocated do not require gradients. Torch 2.13 detects that itself.
            self._stages_forward_initialized = False
        self.pipeline_order_with_comms = self._tables[self._has_backward]  # type: ignore[assignment]
        super()._step_microbatches(*args, **kwargs)


def _open_no_connection_to_itself(stage: PipelineStage) -> None:
    """Keep a stage from opening a connection to its own rank.

    Torch 2.11 sends a first message between two stages on one rank too. Gloo cannot send a message to its own rank.
    """
    make = stage._get_init_p2p_neighbors_ops

    def ops() -> list[Any]:
        return [op for op in make() if op.group_peer != stage.group_rank]

    stage._get_init_p2p_neighbors_ops = ops  # type: ignore[method-assign]
