"""A trainer for one model: the model, its optimizer and the training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from symm_overlap.demo.config import VOCABULARY, TrainConfig
from symm_overlap.demo.forms import Form, compiled
from symm_overlap.demo.model import LanguageModel, local


class Trainer:
    """Trains the model in one form.

    ``group`` has the ranks that share layers; None means this rank alone. ``data`` has the ranks that share the windows
    of a step, if there are any. All ranks call :meth:`step` with the same windows. ``stages`` is the number of pipeline
    stages, and ``parameter_count`` the number of parameters of the whole model, over all ranks.
    """

    stages = 1

    def __init__(
        self,
        config: TrainConfig,
        form: Form,
        group: dist.ProcessGroup | None,
        device: torch.device,
        data: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = form.name
        self.group, self.data = group, data
        self.rank, self.world = _place_in(group)
        self.device = device
        models = [model.to(device) for model in self._models(config, form)]
        self.parameter_count = sum(model.parameter_count(self.world) for model in models)
        self.models = [form.wrap(model) for model in models]
        self.model = self.models[0]
        self._forward = compiled(self.model) if form.compiled else self.model
        self._replicated = [each for model in models for each in model.replicated_parameters()]
        self._optimizer = optimizer_of(self.models, config.lr)
        self.planned = self._plan(form)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / config.warmup)
        )

    def _models(self, config: TrainConfig, form: Form) -> list[LanguageModel]:
        """Create this rank's modules of the model. Here it is one module with this rank's part of every layer."""
        return [form.model(config)]

    def _plan(self, form: Form) -> object:
        """Plan when parameters are gathered. Return the plan, which is printed at the end of the run, or None."""
        return None if form.shared is None else form.shared.plan(self.model, self._optimizer)

    def step(self, windows: Tensor) -> float:
        """Run one optimizer step on ``windows`` (seq + 1, batch).

        Returns the loss before the step in nats a byte, over all windows.
        """
        loss = self._mean(self.gradients(self.share(windows)))
        with record_function(f"{self.name}: optimizer"):
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        return loss.item()  # on a GPU this also waits for the step to end

    def share(self, windows: Tensor) -> Tensor:
        """Return the windows of a step that this rank trains on."""
        copy, copies = _place_in(self.data)
        return windows.chunk(copies, dim=1)[copy]

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the mean of ``loss`` over all windows of a step."""
        if self.data is None:
            return loss
        dist.all_reduce(loss, group=self.data)
        return loss / dist.get_world_size(self.data)

    def gradients(self, window: Tensor) -> Tensor:
        """Add gradients to this rank's parameters, and return the loss over the ranks that share layers.

        Loss and gradients belong to the mean over ``window``, this rank's share of the windows. If other ranks train on
        other windows, the gradients are also averaged over these ranks.
        """
        inputs, targets = self.rows(window[:-1]), self.rows(window[1:])
        with record_function(f"{self.name}: forward"):
            logits = self._forward(inputs)
            # Compute this rank's share of the mean over the whole window: the sum over ranks is the loss, and the
            # gradients.
            local = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
            local = local / window[1:].numel()
        with record_function(f"{self.name}: backward"):
            torch.autograd.backward(local)
        with record_function(f"{self.name}: reduce loss and replicated gradients"):
            return sum_over_ranks(local.detach(), self._replicated, self.group)

    def rows(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sequence."""
        return whole.chunk(self.world)[self.rank].to(self.device)

    @torch.no_grad()
    def logits_at(self, window: Tensor, position: int) -> Tensor:
        """Return on every rank the logits after byte ``position`` of a window (seq, 1): float32 of shape (256,)."""
        return self.from_owner(self.model(self.rows(window)), window.size(0), position)

    def from_owner(self, logits: Tensor, seq: int, position: int) -> Tensor:
        """Return on all ranks the logits of one byte. Each rank passes its own rows of them, (seq / world, 1, 256)."""
        owner, row = divmod(position, seq // self.world)
        last = logits[row, 0].float().contiguous()
        if self.group is not None:
            dist.broadcast(last, group_src=owner, group=self.group)
        return last


def optimizer_of(models: Sequence[nn.Module], lr: float) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    by_type: dict[type, list[nn.Parameter]] = {}  # a fused step needs tensors of the same type
    for parameter in (parameter for model in models for parameter in model.parameters()):
        by_type.setdefault(type(parameter), []).append(parameter)
    groups = [{"params": parameters} for parameters in by_type.values()]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def sum_over_ranks(loss: Tensor, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``loss`` and the gradients of ``parameters`` over the ranks of ``group`` in one all-reduce.

    Returns the summed loss. The gradients are replaced in place. If ``group`` is None, this rank is alone and nothing
    is summed. If a parameter is sharded over the ranks of another group, the gradients of this rank's shard are summed.
    """
    if group is None:
        return loss
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    flat = torch.cat([loss.reshape(1), *(grad.reshape(-1) for grad in grads)])
    dist.all_reduce(flat, group=group)
    start = 1
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
    return flat[0]


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank and the world size in ``group``. None means one rank alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
