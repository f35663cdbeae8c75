"""An unchanged model of Hugging Face transformers with sharded linear layers under DDP trains as under DDP alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from symm_overlap.fsdp import shard_linears
from tests import huggingface
from tests.fsdp.parity import same_gradients, same_parameters
from tests.ranks import Pool, Rank

VOCABULARY, LENGTH = 31, 6  # no number of ranks divides the vocabulary


def llama(tied: bool) -> nn.Module:
    torch.manual_seed(2)
    shared = {"num_key_value_heads": 2, "tie_word_embeddings": tied}
    return huggingface.llama(VOCABULARY, LENGTH, 16, 2, heads=4, inner=22, **shared).double()


def trains_alike(me: Rank, tied: bool, checkpointed: bool) -> None:
    plain, sharded = llama(tied), llama(tied)
    done = shard_linears(sharded, me.group, shard_dim=int(tied))
    assert len(done.sharded) == 2 * 7 + (not tied)
    assert done.left == ({"lm_head": "it shares a parameter with 'model.embed_tokens'"} if tied else {})
    assert sum(isinstance(each, DTensor) for each in sharded.parameters()) == len(done.sharded)
    if checkpointed:
        sharded.gradient_checkpointing_enable()
        sharded.train()
    models = [DistributedDataParallel(model, process_group=me.group) for model in (plain, sharded)]
    by = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + me.rank)
        tokens = torch.randint(0, VOCABULARY, (2 + me.rank, LENGTH), generator=generator)
        losses = []
        for model, optimizer in zip(models, by, strict=True):
            optimizer.zero_grad()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            losses.append(float(loss))
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        same_gradients(plain, sharded)
        for optimizer in by:
            optimizer.step()
        same_parameters(plain, sharded)


@pytest.mark.parametrize(("world", "tied", "checkpointed"), [(2, False, True), (3, True, False)])
def test_llama_trains_as_under_ddp_alone(ranks: Pool, world: int, tied: bool, checkpointed: bool) -> None:
    ranks.run(world, trains_alike, tied, checkpointed, timeout=120)
