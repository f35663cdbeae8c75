"""The model in one process without any collective, as the reference for sharded models, and a small configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from symm_overlap.demo.collectives import Overlap, Plain
from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.forms import dtensor, explicit
from symm_overlap.demo.rank import Rank as DemoRank
from symm_overlap.demo.rank import groups_of
from symm_overlap.demo.text import Windows, read_text
from symm_overlap.demo.trainer import Trainer
from tests.ranks import Rank

CPU = torch.device("cpu")
CONFIG = TrainConfig(size="tiny", seq=32, batch=2, steps=10, lr=3e-3, sample=0)
KINDS = {
    "plain": lambda me: explicit(Plain(me.group)),
    "overlap": lambda me: explicit(Overlap(me.group)),
    "eager": lambda me: dtensor("eager", me.group, me.device.type, compiled=False),
}


class Alone:
    """The whole model in one process, in which there is nothing to gather or to scatter."""

    name = "alone"
    rank = 0
    world = 1

    def all_gather_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        return [x @ weight for weight in weights]

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


def alone(config: TrainConfig = CONFIG) -> Trainer:
    return Trainer(config, explicit(Alone()), None, CPU)


def sharded(me: Rank, kind: str, config: TrainConfig = CONFIG) -> Trainer:
    return Trainer(config, KINDS[kind](me), me.group, me.device)


def windows(config: TrainConfig = CONFIG) -> Windows:
    return Windows(read_text(None), config.seq, config.batch, config.seed)


@cache
def here(parts: int = 1, copies: int = 1, device: torch.device = CPU) -> DemoRank:
    """Return the place of this process among all ranks of its pool. The groups are created once, by `groups_of`."""
    return DemoRank(dist.get_rank(), dist.get_world_size(), device, *groups_of(device.type, parts, copies))
