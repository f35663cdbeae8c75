"""A sharded weight that is written to between the forward and the backward pass is an error, as with any weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from symm_overlap.fsdp import ShardedLinear
from tests.ranks import Pool, Rank


def written_before_backward(me: Rank) -> None:
    for shard_dim in (0, 1):
        layer = ShardedLinear.from_linear(nn.Linear(4, 6), me.group, shard_dim=shard_dim)
        loss = layer(torch.ones(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
        layer(torch.ones(2, 4)).sum().backward()


def test_a_shard_that_is_written_to_before_the_backward_pass_is_an_error(ranks: Pool) -> None:
    ranks.run(2, written_before_backward)
