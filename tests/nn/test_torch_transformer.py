"""The Transformer of torch's tensor-parallel tests, parallelized by torch's own code with our styles in place of its
own.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from symm_overlap import nn as ours
from tests.nn.reference import EXACT, TORCH, WORLDS, mesh_of, same_gradients
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import choices

needs_attention = pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 has no attention of DTensors on CPU")
STYLES = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput")


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def transformer(me: Rank, sequence_parallel: bool, checkpoint: bool, local: bool) -> list[str]:
    from torch.testing._internal.distributed._tensor import common_dtensor

    torch.manual_seed(0)
    args = common_dtensor.ModelArgs(dropout_p=0.0, checkpoint_activations=checkpoint)
    whole = common_dtensor.Transformer(args).double()
    torch.manual_seed(0)
    model = common_dtensor.Transformer(args).double()
    model.load_state_dict(whole.state_dict())
    with mock.patch.multiple(common_dtensor, **{name: getattr(ours, name) for name in STYLES}):
        common_dtensor.Transformer.parallelize(model, mesh_of(me), sequence_parallel, local_output_for_attn=local)
    tokens = torch.randint(0, args.vocab_size, (2, 8), generator=torch.Generator().manual_seed(3))
    # The model's forward would end with a cast to float32. On CPU, DTensors support only the attention that consists of
    # plain matmuls.
    attention = nullcontext() if local else sdpa_kernel(SDPBackend.MATH)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), attention, implicit_replication():
        expected = loss_of(whole, tokens)
        with choices() as calls:
            loss = loss_of(model, tokens)
            torch.testing.assert_close(loss, expected, **EXACT)
            loss.backward()
    expected.backward()
    same_gradients(model, whole, **EXACT)
    assert model.output.weight is model.tok_embeddings.weight
    return [op for op, _ in calls]


@pytest.mark.parametrize("world", one_in(2, WORLDS))
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence parallel", "replicated"])
@pytest.mark.parametrize("local", [True, pytest.param(False, marks=needs_attention)], ids=["local", "DTensors"])
def test_the_transformer_of_torchs_tests(ranks: Pool, world: int, sequence_parallel: bool, local: bool) -> None:
    calls = ranks.run(world, transformer, sequence_parallel, False, local)[0]
    columns, rows, head = 2 * 2, 2 * 2, 1  # of two layers; q, k and v count as one
    counted = {op: calls.count(op) for op in set(calls) if "matmul" in op}
    # Column-parallel layers gather in the forward pass and, for their weights' gradients, in the backward pass.
    # Row-parallel layers gather in the backward pass.
    if sequence_parallel:
        gathers, scatters = 2 * (columns + head) + rows, rows + columns + head
        assert counted == {"all_gather_matmul": gathers, "matmul_reduce_scatter": scatters}
    else:  # this plan has no style for the module around q, k and v, so they share no gather
        assert counted == {"matmul_all_reduce": rows + 2 * (3 + 1) + head}


def test_the_same_with_activation_checkpointing(ranks: Pool) -> None:
    ranks.run(2, transformer, True, True, True)
