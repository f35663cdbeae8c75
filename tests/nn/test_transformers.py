"""Unmodified models of Hugging Face transformers: parallelized, they have the loss and gradients of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, parallelize_module

from symm_overlap.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from tests import huggingface
from tests.nn.reference import EXACT, WORLDS, mesh_of, needs_strided_shards, same_gradients
from tests.ranks import Pool, Rank
from tests.transforms import choices

VOCABULARY, LENGTH = 32, 8


def llama() -> nn.Module:
    return huggingface.llama(VOCABULARY, LENGTH, 16, 2, heads=8, inner=24, num_key_value_heads=4).double()


def gpt2() -> nn.Module:
    return huggingface.gpt2(VOCABULARY, LENGTH, 16, 2, heads=4).double()


def llama_plan(sequence_parallel: bool) -> dict[str, Any]:
    given = Shard(1) if sequence_parallel else Replicate()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=given)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": given},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        "model.layers.*.mlp": whole_input(given),
        **{f"model.layers.*.self_attn.{name}_proj": column for name in "qkv"},
        **{f"model.layers.*.mlp.{name}_proj": column for name in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": row,
        "model.layers.*.mlp.down_proj": row,
        "lm_head": ColwiseParallel(input_layouts=given, output_layouts=Replicate()),
    }
    if sequence_parallel:
        norm = SequenceParallel(use_local_output=True)
        plan |= {
            f"model.{name}": norm for name in ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")
        }
        # The embedding's output stays whole, because the model counts the positions in it.
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
    return plan


def whole_input(given: Placement) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=given, desired_input_layouts=Replicate(), use_local_output=True)


def parallel_llama(model: nn.Module, me: Rank, sequence_parallel: bool) -> nn.Module:
    return parallelize_module(model, mesh_of(me), llama_plan(sequence_parallel))


def parallel_gpt2(model: nn.Module, me: Rank, sequence_parallel: bool) -> nn.Module:
    given = Shard(1) if sequence_parallel else Replicate()
    row, column = RowwiseParallel(output_layouts=given), ColwiseParallel()
    plan: dict[str, Any] = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
        "transformer.h.*.attn": whole_input(given),
        "transformer.h.*.attn.c_attn": ColwiseParallel(parts=3),  # q, k and v
        "transformer.h.*.attn.c_proj": row,
        "transformer.h.*.mlp": whole_input(given),
        "transformer.h.*.mlp.c_fc": column,
        "transformer.h.*.mlp.c_proj": row,
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = mesh_of(me)
    parallelize_module(model, mesh, plan)
    for block in model.transformer.h:
        block.attn.split_size //= me.world  # the model now splits this rank's part of q, k and v
    if sequence_parallel:
        norm = SequenceParallel(use_local_output=True)
        split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        gather = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        norms = {"transformer.h.*.ln_[12]": norm, "transformer.ln_f": norm}
        parallelize_module(model, mesh, {**norms, "transformer.drop": split})
        parallelize_module(model.transformer.ln_f, mesh, gather)  # the model views its output in the whole shape
    return model


MODELS = {"Llama": (llama, parallel_llama), "GPT-2": (gpt2, parallel_gpt2)}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def transformer(me: Rank, name: str, sequence_parallel: bool) -> list[str]:
    make, parallelize = MODELS[name]
    torch.manual_seed(0)
    whole = make()
    model = parallelize(copy.deepcopy(whole), me, sequence_parallel)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    expected = loss_of(whole, tokens)
    expected.backward()
    with choices() as calls:
        loss = loss_of(model, tokens)
        torch.testing.assert_close(loss, expected, **EXACT)
        loss.backward()
    same_gradients(model, whole, **EXACT)
    return [op for op, _ in calls]


@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT-2", marks=needs_strided_shards)])
@pytest.mark.parametrize("world", WORLDS)
def test_a_model_of_transformers(ranks: Pool, name: str, world: int) -> None:
    calls = ranks.run(world, transformer, name, True, timeout=120)[0]
    # Forward: each of the two layers gathers twice and scatters twice, and the head of Llama gathers. Backward:
    # column-parallel layers scatter and gather again, and row-parallel layers gather.
    head = name == "Llama"
    assert calls.count("all_gather_matmul") == 2 * (2 + 2 + 2) + 2 * head
    assert calls.count("matmul_reduce_scatter") == 2 * (2 + 2) + head
    replicated = ranks.run(world, transformer, name, False, timeout=120)[0]
    assert replicated == ["all_reduce", *["matmul_all_reduce"] * (2 * (2 + 2) + 1)]  # first the embedding


def generated(me: Rank, name: str) -> None:
    """Generate tokens one after another, with a cache of keys and values that is shared out among the ranks."""
    make, parallelize = MODELS[name]
    torch.manual_seed(0)
    whole = make().eval()
    model = parallelize(copy.deepcopy(whole), me, False)
    tokens = torch.randint(0, VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    found, expected = (each.generate(tokens, **options) for each in (model, whole))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_the_whole_model(ranks: Pool, name: str) -> None:
    ranks.run(2, generated, name, timeout=120)
