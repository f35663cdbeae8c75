"""The private APIs of torch.distributed.pipelining. Checked on torch 2.11.0, 2.13.0 and 2.15.0; the runtime on 2.11.0
and 2.13.0.

Nothing but the conversions, and what runs schedules in torch, imports this file, since schedules need no torch.
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
"""Whether I and W together give the right gradient of a weight that a stage uses twice. In torch 2.11 they do not."""

Table = dict[int, list[TorchAction | None]]


class RuntimeOfTables(TorchRuntime):
    """Torch's runtime with tables that were made elsewhere.

    It has one for steps with a backward and one without. Torch's own runs the actions of the backward in any case: at
    the turn of a V it then fails, and it divides gradients that were accumulated before.

    Args:
        stages: this rank's, in ascending order.
        compute, both, forward: the table of the actions that compute; with all that belongs to them; the part of that
            which a step without a backward needs.
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
            # What eval has made for received activations does not ask for gradients. Torch 2.13 sees that by itself.
            self._stages_forward_initialized = False
        self.pipeline_order_with_comms = self._tables[self._has_backward]  # type: ignore[assignment]
        super()._step_microbatches(*args, **kwargs)


def _open_no_connection_to_itself(stage: PipelineStage) -> None:
    """Between two stages on one rank, torch 2.11 sends a first message too, which gloo cannot."""
    make = stage._get_init_p2p_neighbors_ops

    def ops() -> list[Any]:
        return [op for op in make() if op.group_peer != stage.group_rank]

    stage._get_init_p2p_neighbors_ops = ops  # type: ignore[method-assign]
