"""Train one model as a pipeline. This rank has some of the stages, and in these stages its part of every layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.profiler import record_function

from symm_overlap.demo.config import VOCABULARY, TrainConfig
from symm_overlap.demo.forms import Form
from symm_overlap.demo.model import LanguageModel
from symm_overlap.demo.stages import pieces_of_stages, schedule_of
from symm_overlap.demo.trainer import Trainer, sum_over_ranks
from symm_overlap.pipeline import Action, Schedule
from symm_overlap.pipeline.action import FORWARD, FULL_BACKWARD
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage

BATCH = 1
"""The dimension of a window that is cut into microbatches. The sequence is dimension 0."""


class PipelineTrainer(Trainer):
    """Trains the model in one form, as a pipeline.

    Args:
        group: the ranks that share the layers of this rank.
        pipeline: the ranks of this rank's pipeline, one for each part, in order.
        data: the ranks that have the same stages and train on other windows; None if there are none.
    """

    def __init__(
        self,
        config: TrainConfig,
        form: Form,
        group: dist.ProcessGroup,
        device: torch.device,
        pipeline: dist.ProcessGroup,
        data: dist.ProcessGroup | None = None,
    ) -> None:
        self.schedule = schedule_of(config)
        self.stages = self.schedule.stages
        self.pipeline = pipeline
        self._mine = self.schedule.stages_of_ranks[dist.get_rank(pipeline)]
        super().__init__(config, form, group, device, data)
        stages = [Stage(model, index) for model, index in zip(self.models, self._mine, strict=True)]
        self.runtime = PipelineRuntime(
            stages, self.schedule, group=pipeline, loss=self._loss, chunk_args=(TensorChunkSpec(BATCH),)
        )
        once = one_microbatch(self.schedule)
        self._once = PipelineRuntime(stages, once, group=pipeline, chunk_args=(TensorChunkSpec(BATCH),))
        count = torch.tensor(self.parameter_count, device=device)
        dist.all_reduce(count, group=pipeline)
        self.parameter_count = int(count) // self.schedule.pipelines  # each pipeline has a copy

    def _models(self, config: TrainConfig, form: Form) -> list[LanguageModel]:
        stages = self.schedule.stages // self.schedule.pipelines
        pieces = pieces_of_stages(config.model, stages)
        return [form.model(config, pieces[index % stages]) for index in self._mine]

    def _plan(self, form: Form) -> object:
        """Return None: the schedule already determines when the parameters of a stage are gathered."""
        return None

    def gradients(self, window: Tensor) -> Tensor:
        inputs, targets = self.rows(window[:-1]), self.rows(window[1:])
        losses: list[Tensor] = []
        with record_function(f"{self.name}: pipeline"):
            self.runtime.step(inputs, target=targets.t(), losses=losses, return_outputs=False)
        with record_function(f"{self.name}: reduce loss and replicated gradients"):
            # The ranks of the last stage have their share of each microbatch's loss. All other ranks have no loss.
            local = sum(losses, torch.zeros((), device=self.device)) / self.schedule.microbatches
            loss = sum_over_ranks(local, self._replicated, self.group)
            dist.all_reduce(loss, group=self.pipeline)
        return loss

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the mean loss of a microbatch.

        ``targets`` has the batch as its first dimension, because the runtime cuts targets along the first dimension.
        """
        local = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.t().reshape(-1), reduction="sum")
        return local / (targets.numel() * self.world)

    @torch.no_grad()
    def logits_at(self, window: Tensor, position: int) -> Tensor:
        found = self._once.eval(self.rows(window).expand(-1, self.schedule.pipelines))
        last = self.schedule.stages // self.schedule.pipelines - 1
        source = self.schedule.rank_of(last)
        if dist.get_rank(self.pipeline) == source:
            logits = self.from_owner(found, window.size(0), position)
        else:
            logits = torch.empty(VOCABULARY, device=self.device)
        dist.broadcast(logits, group_src=source, group=self.pipeline)
        return logits


def one_microbatch(schedule: Schedule) -> Schedule:
    """Return a schedule with the same stages that runs one microbatch for each pipeline, forward and then backward."""
    each = schedule.stages // schedule.pipelines
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for pipeline in range(schedule.pipelines):
        stages = range(pipeline * each, (pipeline + 1) * each)
        for stage in stages:
            rows[schedule.rank_of(stage)].append(Action(stage, FORWARD, pipeline))
        for stage in reversed(stages):
            rows[schedule.rank_of(stage)].append(Action(stage, FULL_BACKWARD, pipeline))
    return Schedule.from_rows(rows, schedule.placement, schedule.pipelines, schedule.pipelines)
