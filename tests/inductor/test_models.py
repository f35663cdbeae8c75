"""Models of other libraries and common blocks, compiled up to the pass. Every collective beside a matmul is fused, in
the forward and in the backward graph, and the results are the same as in eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.collective.test_fake_group import fake_group
from tests.inductor import models
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.quick import one_in
from tests.ranks import Pool, Rank
from tests.transforms import comparing

LENGTH, TOKENS = 16, 16


def hidden(world: int, batch: int) -> Tensor:
    return torch.randn(batch, LENGTH // world, models.WIDTH)


def replicated(world: int, batch: int) -> Tensor:
    return torch.randn(batch, LENGTH, models.WIDTH, generator=torch.Generator().manual_seed(1))


def rows(world: int, batch: int) -> Tensor:
    return torch.randn(batch * LENGTH // world, models.WIDTH)


def tokens(world: int, batch: int) -> Tensor:
    return torch.randint(0, TOKENS, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def functional(mesh: DeviceMesh) -> nn.Module:
    return models.FunctionalMLP(mesh.get_group())


Make = Callable[[DeviceMesh], nn.Module]
MODELS: dict[str, tuple[Make, Callable[[int, int], Tensor], tuple[int, int]]] = {
    # the model, its input, and the number of collectives beside a matmul in the forward and in the backward graph
    "MLP, dim 0": (models.common("MLP, dim 0"), rows, (2, 2)),
    "MLP, dim 1": (models.common("MLP, dim 1"), hidden, (2, 2)),
    "MLP, dim 1, no bias": (models.common("MLP, dim 1, no bias"), hidden, (2, 2)),
    "MLP, all-reduce": (models.common("MLP, all-reduce"), replicated, (1, 1)),
    "functional": (functional, rows, (2, 2)),
    "block": (models.common("block, batch 2"), hidden, (4, 4)),
    "block, all-reduce": (models.common("block, all-reduce"), replicated, (2, 2)),
    "GPT-2 block": (partial(models.sequence_parallel_older_block, norms_first=True), hidden, (4, 4)),
    "BERT block": (partial(models.sequence_parallel_older_block, norms_first=False), hidden, (4, 4)),
    "torch's Transformer": (partial(models.torch_transformer, sequence_parallel=True), tokens, (5, 5)),
    "torch's Transformer, all-reduce": (partial(models.torch_transformer, sequence_parallel=False), tokens, (2, 3)),
    "Llama": (partial(models.llama, sequence_parallel=True), tokens, (5, 5)),
    "Llama, all-reduce": (partial(models.llama, sequence_parallel=False), tokens, (2, 2)),
}
TRACED = ["torch's Transformer", "Llama, all-reduce"]  # models that take seconds; the other two of these are run
QUICK = [name for name in MODELS if "Transformer" not in name and "Llama" not in name]


def local(tensor: Any) -> Tensor:
    tensor = getattr(tensor, "logits", tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step(model: Callable[..., Any], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    y = local(model(x))
    y.backward(torch.arange(y.numel(), dtype=y.dtype, device=y.device).view_as(y).sin())
    grads = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [y.detach(), *(local(grad) for grad in grads if grad is not None)]


def fused_in(make: Make, x: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return how many collectives are fused in each graph. Raise if a collective beside a matmul is not fused."""
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    module = make(DeviceMesh.from_group(group, "cpu"))
    step(compiled_up_to_the_pass(module, OverlapPass(Choices(strict=True))), module, x)
    return [graph.fused for graph in symm_overlap.inductor.report().graphs]


@pytest.mark.parametrize(
    ("name", "world", "batch"),
    [
        *((name, 8, 1) for name in QUICK if name != "BERT block"),
        pytest.param("BERT block", 8, 1, marks=pytest.mark.slow),
        pytest.param("block", 4, 2, marks=pytest.mark.slow),
        *(pytest.param(name, 2, 2, marks=pytest.mark.slow) for name in TRACED),
    ],
)
def test_every_collective_beside_a_matmul_is_fused(name: str, world: int, batch: int) -> None:
    make, inputs, expected = MODELS[name]
    with fake_group(world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dist.group.WORLD is not None
        assert fused_in(make, inputs(world, batch), dist.group.WORLD) == list(expected)


def as_in_eager_mode(me: Rank, name: str, batch: int) -> None:
    make, inputs, expected = MODELS[name]
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(0)
    module = make(DeviceMesh.from_group(me.group, "cpu")).double()
    torch.manual_seed(me.rank)
    x = inputs(me.world, batch)
    x = x.double() if x.is_floating_point() else x
    model = compiled_up_to_the_pass(module, OverlapPass(Choices(strict=True)))
    with comparing(False):
        found = step(model, module, x)
    for one, other in zip(found, step(module, module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        assert one.stride() == other.stride()
    assert [graph.fused for graph in symm_overlap.inductor.report().graphs] == list(expected)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *one_in(2, ((name, 2) for name in QUICK if name not in ("GPT-2 block", "BERT block"))),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("GPT-2 block", 2), ("BERT block", 2), ("block", 1))
        ),
    ],
)
def test_models_compute_what_they_compute_in_eager_mode(ranks: Pool, name: str, batch: int) -> None:
    ranks.run(2, as_in_eager_mode, name, batch, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*QUICK, *TRACED)])
def test_models_of_others_compute_what_they_compute_in_eager_mode(ranks: Pool, name: str) -> None:
    ranks.run(2, as_in_eager_mode, name, 2, timeout=240)


def checkpointed(me: Rank, name: str, keep_matmuls: bool) -> tuple[int, set[str]]:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    make, inputs, _ = MODELS[name]
    module = models.Checkpointed(make(DeviceMesh.from_group(me.group, "cpu")), keep_matmuls).double()
    x = inputs(me.world, 2).double()
    model = compiled_up_to_the_pass(module, OverlapPass(Choices()))
    with comparing(False):
        found = step(model, module, x)
    for one, other in zip(found, step(module.module, module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    report = symm_overlap.inductor.report()
    return report.fused, {site.reason.partition(",")[0] for site in report.skipped}


def test_checkpointed_modules(ranks: Pool) -> None:
    ((fused, reasons), other) = ranks.run(2, checkpointed, "functional", False, timeout=120)
    assert fused >= 4  # more if torch gathers again in the backward pass
    assert not reasons
    assert other == (fused, reasons)


@pytest.mark.parametrize(("name", "sites"), [("functional", 4), ("MLP, all-reduce", 2)])
def test_modules_whose_products_are_saved(ranks: Pool, name: str, sites: int) -> None:
    ((fused, reasons), other) = ranks.run(2, checkpointed, name, True, timeout=120)
    assert fused >= sites
    assert not reasons
    assert other == (fused, reasons)


def in_bfloat16(me: Rank) -> None:
    torch._dynamo.reset()
    torch.manual_seed(me.rank)
    module = models.FunctionalMLP(me.group)
    x = torch.randn(8, models.WIDTH)
    exact = [tensor.clone() for tensor in step(module.double(), module, x.double())]
    module, x = module.bfloat16(), x.bfloat16()
    plain = [tensor.clone() for tensor in step(module, module, x)]
    with comparing(False):
        found = step(compiled_up_to_the_pass(module, OverlapPass(Choices(strict=True))), module, x)
    for one, other, right in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert (one - right).norm() <= 1.25 * (other - right).norm() + 1e-6


def test_bfloat16_is_as_exact_as_in_eager_mode(ranks: Pool) -> None:
    ranks.run(2, in_bfloat16, timeout=120)


def under_autocast(me: Rank) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    module = models.common("MLP, dim 1, no bias")(DeviceMesh.from_group(me.group, "cpu"))
    x, results = torch.randn(2, LENGTH // me.world, models.WIDTH), []
    for custom_pass in (None, OverlapPass(Choices())):
        model = compiled_up_to_the_pass(module, custom_pass, dynamic=False)
        with comparing(False), torch.autocast("cpu", torch.bfloat16):
            results.append([tensor.clone() for tensor in step(model, module, x)])
        torch._dynamo.reset()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    forward, backward = symm_overlap.inductor.report().graphs
    # 32 numbers of each of 2 x 8 rows, in bfloat16, from the other rank
    assert {site.moved for graph in (forward, backward) for site in graph.sites} == {
        2 * LENGTH // me.world * models.WIDTH * 2
    }
    assert (forward.fused, backward.fused) == (2, 2)


def test_under_autocast_bfloat16_is_sent(ranks: Pool) -> None:
    ranks.run(2, under_autocast, timeout=120)


def symbolic_sizes(me: Rank, fixed_length: bool) -> None:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(me.rank)
    module = models.common("MLP, dim 1")(DeviceMesh.from_group(me.group, "cpu")).double()
    compiled = compiled_up_to_the_pass(module, OverlapPass(Choices(strict=True)), dynamic=True)

    def model(x: Tensor) -> Tensor:
        if fixed_length:
            torch._dynamo.mark_static(x, (1, 2))
        return compiled(x)

    for longer in (1, 2, 3):
        shape = (2 * longer, 4) if fixed_length else (2, 4 * longer)
        x = torch.randn(*shape, models.WIDTH, dtype=torch.float64)
        with comparing(False):
            found = step(model, module, x)
        for one, other in zip(found, step(module, module, x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert [graph.fused for graph in symm_overlap.inductor.report().graphs][:2] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fixed_length", [False, True])
def test_sizes_may_be_symbolic(ranks: Pool, fixed_length: bool) -> None:
    """Of a batch of sequences, all sizes, or the number of sequences alone. The compiler then divides symbols."""
    ranks.run(2, symbolic_sizes, fixed_length, timeout=240)
