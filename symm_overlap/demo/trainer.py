"""One model with its optimizer, trained a step at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from symm_overlap.demo.config import VOCABULARY, TrainConfig
from symm_overlap.demo.forms import Form, compiled
from symm_overlap.demo.model import LanguageModel


class Trainer:
    """Trains the model in one form.

    ``group`` joins the ranks; None stands for one rank alone. All ranks call :meth:`step` with the same window.
    ``stages`` is how many stages of a pipeline there are.
    """

    stages = 1

    def __init__(self, config: TrainConfig, form: Form, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.name = form.name
        self.group = group
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.device = device
        self.models = [model.to(device) for model in self._models(config, form)]
        self._replicated = [each for model in self.models for each in model.replicated_parameters()]
        replicated = {id(parameter) for parameter in self._replicated}
        every = [parameter for model in self.models for parameter in model.parameters()]
        self._split = [parameter for parameter in every if id(parameter) not in replicated]
        groups = [{"params": each} for each in (self._split, self._replicated) if each]
        self._optimizer = torch.optim.AdamW(
            groups,  # a fused step takes tensors of one type
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / config.warmup)
        )

    def _models(self, config: TrainConfig, form: Form) -> list[LanguageModel]:
        """What this rank has of the model: here its part of every layer."""
        self.model = form.model(config)
        self._forward = compiled(self.model) if form.compiled else self.model
        return [self.model]

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, over all ranks."""
        return self._parameters_here()

    def _parameters_here(self) -> int:
        """Parameters of the models of this rank, over all ranks of its group."""
        split = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in self._split)
        return split * self.world + sum(p.numel() for p in self._replicated)

    def step(self, window: Tensor) -> float:
        """One optimizer step on ``window`` (seq + 1, batch); returns the loss before it, nats a byte over all ranks."""
        loss = self.gradients(window)
        with record_function(f"{self.name}: optimizer"):
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        return loss.item()  # on a GPU this also waits for the step to end

    def gradients(self, window: Tensor) -> Tensor:
        """Adds the gradients of the loss on ``window`` to this rank's parameters; returns the loss over all ranks."""
        inputs, targets = self.rows(window[:-1]), self.rows(window[1:])
        with record_function(f"{self.name}: forward"):
            logits = self._forward(inputs)
            # Each rank's share of the mean over the whole window, so that summing over ranks gives loss and gradients.
            local = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
            local = local / window[1:].numel()
        with record_function(f"{self.name}: backward"):
            torch.autograd.backward(local)
        with record_function(f"{self.name}: reduce loss and replicated gradients"):
            return sum_over_ranks(local.detach(), self._replicated, self.group)

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's part of the sequence."""
        return whole.chunk(self.world)[self.rank].to(self.device)

    @torch.no_grad()
    def logits_at(self, window: Tensor, position: int) -> Tensor:
        """What the model says behind byte ``position`` of a window (seq, 1), on every rank: (256,), float32."""
        return self.from_owner(self.model(self.rows(window)), window.size(0), position)

    def from_owner(self, logits: Tensor, seq: int, position: int) -> Tensor:
        """Of ``logits`` (seq / world, 1, 256), of which every rank has its rows, the row of one byte on all of them."""
        owner, row = divmod(position, seq // self.world)
        last = logits[row, 0].float().contiguous()
        if self.group is not None:
            dist.broadcast(last, group_src=owner, group=self.group)
        return last


def sum_over_ranks(loss: Tensor, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> Tensor:
    """Sums ``loss`` and the gradients of ``parameters`` over the ranks of ``group``, in one all-reduce.

    Returns the summed loss; the gradients are replaced in place. None stands for one rank alone.
    """
    if group is None:
        return loss
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([loss.reshape(1), *(grad.reshape(-1) for grad in grads)])
    dist.all_reduce(flat, group=group)
    start = 1
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
    return flat[0]
