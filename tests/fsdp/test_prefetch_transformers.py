"""Unchanged models of Hugging Face transformers with ``fully_shard`` on each block have the same losses with a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from symm_overlap.fsdp import plan_prefetch, post_optimizer_event
from symm_overlap.fsdp.prefetch.step_plan import Options, step_plan
from symm_overlap.plan import verify
from tests.nn.test_transformers import LENGTH, VOCABULARY, gpt2, llama
from tests.quick import one_in
from tests.ranks import Pool, Rank

MODELS = {"llama": (llama, "model.layers"), "gpt2": (gpt2, "transformer.h")}


def trained(me: Rank, name: str, policy: str | None, checkpoints: bool) -> tuple[list[float], str, Any]:
    """Train a few steps. Return the losses, the plan as text, and what it prefetches."""
    torch.manual_seed(0)
    make, blocks = MODELS[name]
    model: Any = make()
    if checkpoints:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    mesh = DeviceMesh.from_group(me.group, "cpu")
    for block in model.get_submodule(blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = None
    if policy is not None:
        post_optimizer_event(optimizer, model)
        plan = plan_prefetch(model, policy, verbose=False)
    losses = []
    generator = torch.Generator().manual_seed(me.rank)
    for _ in range(4):
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if plan is None:
        return losses, "", None
    assert plan.status == "planned", plan
    assert not plan.note, plan.note
    assert plan.trace is not None
    made = step_plan(plan.trace, plan.prefetch, Options(rounds=2, event=True, other=1.0))
    report = verify([[made.for_rank(rank, me.world) for rank in range(me.world)]] * 2)
    assert report.ok, report
    return losses, str(plan), plan.prefetch


def compared(me: Rank, name: str, checkpoints: bool) -> str:
    losses = trained(me, name, None, checkpoints)[0]
    assert len(set(losses)) == len(losses)
    texts = []
    for policy in ("auto", "depth=1"):
        found, text, _ = trained(me, name, policy, checkpoints)
        assert found == losses, policy
        texts.append(text)
    return texts[-1]


@pytest.mark.parametrize("checkpoints", one_in(2, [False, True], first=1), ids=["", "checkpoints"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_same_with_and_without_a_plan(ranks: Pool, name: str, checkpoints: bool) -> None:
    first, second = (f"{MODELS[name][1]}.{index}" for index in range(2))
    for text in ranks.run(2, compared, name, checkpoints):
        lines = text.splitlines()
        assert f"{first}: forward {second}; backward nothing" in lines
        assert f"{second}: forward torch's default; backward {first}" in lines
        assert f"the model: forward {first}; backward {second}" in lines
