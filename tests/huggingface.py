"""Small Hugging Face transformers models with random weights: models that were written outside of this project."""

from __future__ import annotations

from typing import Any

from torch import nn


def llama(vocabulary: int, length: int, width: int, layers: int, heads: int, inner: int, **config: Any) -> nn.Module:
    """Return a Llama for sequences of ``length`` tokens. Its feed-forward layers have the width ``inner``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": vocabulary, "max_position_embeddings": length, "hidden_size": width}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, **config))


def gpt2(vocabulary: int, length: int, width: int, layers: int, heads: int) -> nn.Module:
    """Return a GPT-2 for sequences of ``length`` tokens, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": vocabulary, "n_positions": length, "n_embd": width, "n_layer": layers, "n_head": heads}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False))


def mixtral(vocabulary: int, length: int, width: int, layers: int, heads: int, inner: int, experts: int) -> nn.Module:
    """Return a Mixtral. Each of its feed-forward layers has ``experts`` experts, of which a token uses two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": vocabulary, "max_position_embeddings": length, "hidden_size": width}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    sizes |= {"intermediate_size": inner, "num_local_experts": experts}
    # The default, grouped matmuls, has no kernel for float64.
    return MixtralForCausalLM(MixtralConfig(**sizes, use_cache=False, experts_implementation="batched_mm"))
