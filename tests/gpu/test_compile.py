"""Compiled code: ops in graphs, and collectives with matmuls that the pass replaces by ops."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor

import symm_overlap
from tests.collective.gradient_cases import CASES, Case, Inputs
from tests.gpu.conditions import Path, finish, on_path
from tests.gpu.conftest import Worlds
from tests.gpu.test_values import difference, everyone, plain, weights_like, zeros_and_ones
from tests.inductor.models import WIDTH, FunctionalMLP
from tests.inductor.test_models import step
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

KINDS = list({type(case).__name__: case for case in CASES}.values())
"""The last case of each kind."""


def compiled(me: Rank, case: Case, path: Path) -> str:
    """Compare forward and backward with the plain form. On CPU the calls are only traced: compiling takes a minute."""

    def run(*inputs: Tensor) -> Inputs:
        return case.run(list(inputs), me)

    def make(shape: tuple[int, ...], seed: int) -> Tensor:
        return zeros_and_ones(shape, torch.float32, seed)

    torch._dynamo.reset()
    function = torch.compile(run, fullgraph=True, backend="inductor" if me.device.type == "cuda" else "aot_eager")
    inputs = everyone(case, me.world, make, me.device)
    weights = weights_like(case, inputs, make)
    leaves = [each.clone().requires_grad_() for each in inputs[me.rank]]
    with on_path(path):
        outputs = function(*leaves)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, weights[me.rank])]
    expected = plain(case, inputs, weights, torch.float64, me.rank)
    return "\n".join(filter(None, (difference(*each) for each in zip(found, expected, strict=True))))


def ops_in_graphs(me: Rank, path: Path) -> None:
    # With caches, ranks would find each other's graphs, and one of them would not compile.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        problems = [f"{case}: {text}" for case in KINDS if (text := compiled(me, case, path))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", [("pipelined", 2, 2), ("fused", 1, None)], ids=str)
def test_compiled_ops_give_exact_values_and_gradients(gpu_ranks: Worlds, path: Path) -> None:
    gpu_ranks.run(2, ops_in_graphs, path, timeout=280)


def model_with_the_pass(me: Rank, folder: str) -> None:
    """Compile a model with the pass and a separate cache for each rank.

    Keys of the cache contain the state that the pass depends on. Ranks do not find each other's graphs.
    """
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    module = FunctionalMLP(me.group).to(torch.float64)
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    # On CPU, because functional collectives of gloo crash for tensors of a GPU.
    expected = [each.to(me.device) for each in step(module, module, x)]
    module, x = module.to(me.device), x.to(me.device)
    own = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{folder}/{me.rank}")
    with own, torch._inductor.config.patch(fx_graph_cache=True):
        # The path is forced, because on a GPU the pass leaves such small problems to torch.distributed.
        model = torch.compile(module, options=symm_overlap.inductor.options(strict=True, path="pipelined"))
        for _ in range(2):
            for one, other in zip(step(model, module, x), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
                assert one.stride() == other.stride()
    finish(me)
    assert sum(graph.fused for graph in symm_overlap.inductor.report().graphs) > 0


def test_a_compiled_model_computes_what_it_computes_in_eager_mode(gpu_ranks: Worlds, tmp_path: Any) -> None:
    gpu_ranks.run(2, model_with_the_pass, str(tmp_path), timeout=280)
