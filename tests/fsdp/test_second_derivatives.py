"""A penalty on gradients that ranks average, as docs/fsdp.md describes it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import grad

from symm_overlap.fsdp import shard_linears
from tests.nn.reference import EXACT, TORCH, mesh_of, values
from tests.ranks import Pool, Rank

IN, OUT = 8, 12


def penalises_gradients(me: Rank, shard_dim: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN)).double()
    model = copy.deepcopy(whole)
    shard_linears(model, mesh_of(me), shard_dim=shard_dim)
    batches = [values((4, IN), seed) for seed in range(me.world)]

    gradients = grad(model(batches[me.rank]).square().sum(), list(model.parameters()), create_graph=True)
    penalty = sum(each.square().sum().full_tensor() for each in gradients)
    found = grad(me.world * penalty, list(model.parameters()))

    loss = sum(whole(batch).square().sum() for batch in batches) / me.world
    penalty = sum(each.square().sum() for each in grad(loss, list(whole.parameters()), create_graph=True))
    for one, other in zip(found, grad(penalty, list(whole.parameters())), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, **EXACT)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 does not differentiate gradients of DTensors")
@pytest.mark.parametrize("shard_dim", [0, 1])
def test_a_penalty_on_gradients(ranks: Pool, shard_dim: int) -> None:
    ranks.run(2, penalises_gradients, shard_dim)
