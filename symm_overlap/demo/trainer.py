"""One model with its optimizer, trained a step at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from symm_overlap.demo.config import VOCABULARY, TrainConfig
from symm_overlap.demo.model import Collectives, LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """Trains one model through one implementation of the collectives.

    ``group`` joins the ranks of ``comm``. All ranks call :meth:`step` with the same window.
    """

    def __init__(
        self, config: TrainConfig, comm: Collectives, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.comm = comm
        self.group = group
        self.device = device
        self.model = LanguageModel(config.model, config.seq, config.seed, comm, DTYPES[config.dtype]).to(device)
        self._replicated = self.model.replicated_parameters()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / config.warmup)
        )

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, over all ranks."""
        replicated = sum(p.numel() for p in self._replicated)
        return (sum(p.numel() for p in self.model.parameters()) - replicated) * self.comm.world + replicated

    def step(self, window: Tensor) -> float:
        """One optimizer step on ``window`` (seq + 1, batch); returns the loss before it, nats a byte over all ranks."""
        loss = self.gradients(window)
        with record_function(f"{self.comm.name}: optimizer"):
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        return loss.item()  # on a GPU this also waits for the step to end

    def gradients(self, window: Tensor) -> Tensor:
        """Adds the gradients of the loss on ``window`` to this rank's parameters; returns the loss over all ranks."""
        rank, world = self.comm.rank, self.comm.world
        inputs, targets = (part.chunk(world)[rank].to(self.device) for part in (window[:-1], window[1:]))
        with record_function(f"{self.comm.name}: forward"):
            logits = self.model(inputs)
            # Each rank's share of the mean over the whole window, so that summing over ranks gives loss and gradients.
            local = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
            local = local / window[1:].numel()
        with record_function(f"{self.comm.name}: backward"):
            torch.autograd.backward(local)
        with record_function(f"{self.comm.name}: reduce loss and replicated gradients"):
            return sum_over_ranks(local.detach(), self._replicated, self.group)


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
