"""Compiled models of two ranks: with the pass they compute what they compute without it, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import symm_overlap
from tests.inductor.models import WIDTH, sequence_parallel_block, sequence_parallel_mlp, tensor_parallel_mlp
from tests.ranks import Pool, Rank
from tests.transforms import comparing

MODELS: dict[str, tuple[Callable[[DeviceMesh], nn.Module], tuple[int, ...], bool, list[int]]] = {
    # the model, a rank's input, whether that is the same on every rank, and how many collectives each graph has
    "MLP, dim 0": (lambda mesh: sequence_parallel_mlp(mesh, 0), (8, WIDTH), False, [2, 2]),
    "MLP, dim 1": (lambda mesh: sequence_parallel_mlp(mesh, 1), (2, 8, WIDTH), False, [2, 2]),
    "MLP, all-reduce": (tensor_parallel_mlp, (2, 8, WIDTH), True, [1, 1]),
    "block, batch 1": (sequence_parallel_block, (1, 8, WIDTH), False, [4, 4]),
    "block, batch 2": (sequence_parallel_block, (2, 8, WIDTH), False, [4, 4]),
}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step(model: Callable[..., Any], module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = local(model(x))
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin())
    return [y.detach(), x.grad, *(local(parameter.grad) for parameter in module.parameters())]  # type: ignore[list-item]


def without_cached_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Ranks share compiled kernels, but no graphs: one that comes from the cache is not in the report."""

    @wraps(function)
    def run(*args: Any) -> None:
        graphs = torch._inductor.config.patch(fx_graph_cache=False)
        with graphs, torch._functorch.config.patch(enable_autograd_cache=False):
            function(*args)

    return run


def fresh(me: Rank, folder: str, name: str) -> tuple[nn.Module, Tensor]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    make, shape, replicated, _ = MODELS[name]
    torch.manual_seed(0)
    module = make(DeviceMesh.from_group(me.group, "cpu"))
    torch.manual_seed(1 if replicated else 100 + me.rank)
    return module, torch.randn(shape)


@without_cached_graphs
def compiled_as_eager(me: Rank, folder: str, name: str) -> None:
    module, x = fresh(me, folder, name)
    with comparing(False):
        expected = step(module, module, x)
        model = torch.compile(module, options=symm_overlap.inductor.options(strict=True))
        for _ in range(2):
            for one, other in zip(step(model, module, x), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert one.stride() == other.stride()
    report = symm_overlap.inductor.report()
    assert [graph.fused for graph in report.graphs] == MODELS[name][3]
    assert not report.skipped
    assert all("models.py:" in site.where for graph in report.graphs for site in graph.sites), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_computes_what_it_computes_in_eager_mode(ranks: Pool, tmp_path: Any, name: str) -> None:
    ranks.run(2, compiled_as_eager, str(tmp_path), name, timeout=180)


@without_cached_graphs
def dynamic_shapes(me: Rank, folder: str, name: str) -> None:
    module, x = fresh(me, folder, name)
    model = torch.compile(module, dynamic=True, options=symm_overlap.inductor.options(strict=True))
    with comparing(False):
        for longer in (1, 2, 3):
            X = torch.cat([x * factor for factor in range(1, longer + 1)], -2)
            for one, other in zip(step(model, module, X), step(module, module, X), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert [graph.fused for graph in symm_overlap.inductor.report().graphs][:2] == MODELS[name][3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP, dim 0", "block, batch 2"])
def test_sizes_may_be_symbolic(ranks: Pool, tmp_path: Any, name: str) -> None:
    ranks.run(2, dynamic_shapes, str(tmp_path), name, timeout=240)


@without_cached_graphs
def ways_to_ask(me: Rank, folder: str) -> None:
    inductor = symm_overlap.inductor
    ran: list[int] = []

    def mine(graph: torch.fx.Graph) -> None:
        ran.append(len(graph.nodes))

    def compiled(block: AbstractContextManager[Any], backward_inside: bool) -> int:
        module, x = fresh(me, folder, "MLP, dim 0")
        with comparing(False), block:
            y = local(torch.compile(module)(x.requires_grad_()))
            if backward_inside:
                y.sum().backward()
        with comparing(False):
            if not backward_inside:
                y.sum().backward()
        return inductor.report().fused

    import torch._inductor.config as config

    assert compiled(nullcontext(), True) == 0
    assert compiled(inductor.enabled(), True) == 4
    assert compiled(inductor.enabled(), False) == 4, "the backward graph belongs to its forward graph"
    with config.patch(post_grad_custom_pre_pass=mine):
        assert compiled(inductor.enabled(), True) == 4
        assert len(ran) == 2, "a pass that the user has goes on running"
        inductor.enable()
        inductor.enable(strict=True)
        assert compiled(nullcontext(), True) == 4
        inductor.disable()
        assert config.post_grad_custom_pre_pass is mine
        assert len(ran) == 4
    assert compiled(nullcontext(), True) == 0


@pytest.mark.slow
def test_every_way_to_ask_for_the_pass(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(2, ways_to_ask, str(tmp_path), timeout=240)


@without_cached_graphs
def nothing_to_fuse(me: Rank, folder: str) -> None:
    def plain(x: Tensor) -> Tensor:
        return (x @ x).relu()

    fresh(me, folder, "MLP, dim 0")
    with pytest.warns(UserWarning, match="this graph has no collective beside a matmul"):
        torch.compile(plain, options=symm_overlap.inductor.options())(torch.ones(4, 4))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="this graph has no collective beside a matmul"):
        torch.compile(plain, options=symm_overlap.inductor.options(strict=True))(torch.ones(4, 4))


@pytest.mark.slow
def test_a_graph_in_which_nothing_is_fused_warns_and_with_strict_raises(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(1, nothing_to_fuse, str(tmp_path), timeout=120)


def test_the_key_of_cached_graphs_depends_on_groups_choices_and_passes() -> None:
    from symm_overlap.inductor.choices import Choices
    from symm_overlap.inductor.custom_pass import OverlapPass
    from tests.collective.test_fake_group import fake_group

    keys = []
    for world in (2, 4):
        with fake_group(world):
            keys += [OverlapPass(Choices(strict)).uuid() for strict in (False, True)]
    assert len({str(key) for key in keys}) == 4
    own = OverlapPass(Choices())
    assert OverlapPass(Choices()).uuid() == own.uuid()
    assert OverlapPass(Choices(), before=own).uuid() not in (None, own.uuid())
    assert OverlapPass(Choices(), before=lambda graph: None).uuid() is None, "a pass without a key: nothing is cached"
