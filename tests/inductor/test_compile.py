"""torch.compile with the pass on two ranks: values, training, settings, and the ways to enable the pass."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh

import symm_overlap
from symm_overlap.inductor import NotFusedError
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.collective.test_fake_group import fake_group
from tests.inductor.models import WIDTH, FunctionalMLP, common
from tests.inductor.test_models import step
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.ranks import Pool, Rank
from tests.transforms import comparing

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def without_cached_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that ranks share compiled kernels in the cache, but no graphs."""

    @wraps(function)
    def run(*args: Any) -> Any:
        graphs = torch._inductor.config.patch(fx_graph_cache=False)
        with graphs, torch._functorch.config.patch(enable_autograd_cache=False):
            return function(*args)

    return run


def fresh(me: Rank, folder: str) -> tuple[nn.Module, Tensor]:
    start_anew(folder)
    torch.manual_seed(me.rank)
    return FunctionalMLP(me.group), torch.randn(8, WIDTH)


def start_anew(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._dynamo.reset()
    symm_overlap.inductor.clear()


@without_cached_graphs
def compiled_as_eager(me: Rank, folder: str) -> None:
    start_anew(folder)
    torch.manual_seed(me.rank)
    module, x = common("block, batch 2")(DeviceMesh.from_group(me.group, "cpu")), torch.randn(2, 8, WIDTH)
    with comparing(False):
        expected = step(module, module, x)
        model = torch.compile(module, options=symm_overlap.inductor.options(strict=True))
        for _ in range(2):
            for one, other in zip(step(model, module, x), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert one.stride() == other.stride()
    report = symm_overlap.inductor.report()
    assert [graph.fused for graph in report.graphs] == [4, 4]
    assert all("models.py:" in site.where for graph in report.graphs for site in graph.sites), str(report)
    assert all(site.path == "sequential" for graph in report.graphs for site in graph.sites)


@pytest.mark.slow
def test_a_compiled_model_computes_what_it_computes_in_eager_mode(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(2, compiled_as_eager, str(tmp_path), timeout=240)


def train(me: Rank, folder: str) -> None:
    (other, _), (module, x) = fresh(me, folder), fresh(me, folder)
    other, module, x = other.double(), module.double(), x.double()
    model = compiled_up_to_the_pass(module, OverlapPass(Choices(strict=True)))
    for run, parameters in ((model, module), (other, other)):
        optimizer = torch.optim.AdamW(parameters.parameters(), lr=1e-2)
        with comparing(False):
            for _ in range(4):
                run(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def test_training_steps(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(2, train, str(tmp_path), timeout=240)


def gathered_product(me: Rank) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return all_gather_tensor(x, 0, me.group) @ weight

    return run


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"path": "fast"}, "force_path"),
        ({"chunks": 0}, "chunks is 0"),
        ({"span": 0}, "span is 0"),
        ({"timeout": 0}, "timeout"),
        ({"lane": -1}, "lanes are numbered from 0"),
    ],
)
def test_settings_out_of_range_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        symm_overlap.inductor.options(**choices)


@without_cached_graphs
def ways_to_ask(me: Rank, folder: str) -> None:
    inductor = symm_overlap.inductor
    ran: list[int] = []

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return all_gather_tensor_autograd(x, 0, me.group) @ weight

    def mine(graph: torch.fx.Graph) -> None:
        ran.append(len(graph.nodes))

    def compiled(block: AbstractContextManager[Any], backward_inside: bool) -> int:
        start_anew(folder)
        x, weight = torch.ones(4, 6, requires_grad=True), torch.ones(6, 5)
        with comparing(False), block:
            y = torch.compile(program)(x, weight)
            if backward_inside:
                y.sum().backward()
        with comparing(False):
            if not backward_inside:
                y.sum().backward()
        return inductor.report().fused

    config = torch._inductor.config
    assert compiled(nullcontext(), True) == 0
    assert compiled(inductor.enabled(), True) == 2
    assert compiled(inductor.enabled(), False) == 2, "the backward graph has the setting of its forward graph"
    with config.patch(post_grad_custom_pre_pass=mine):
        assert compiled(inductor.enabled(), True) == 2
        assert len(ran) == 2, "the user's own pass still runs"
        inductor.enable()
        inductor.enable(strict=True)
        assert compiled(nullcontext(), True) == 2
        inductor.disable()
        assert config.post_grad_custom_pre_pass is mine
        assert len(ran) == 4
    assert compiled(nullcontext(), True) == 0


@pytest.mark.slow
def test_every_way_to_ask_for_the_pass(ranks: Pool, tmp_path: Any) -> None:
    """The pass is enabled by a block or globally, keeps the user's own pass running, and can be disabled."""
    ranks.run(2, ways_to_ask, str(tmp_path), timeout=240)


def test_a_graph_in_which_nothing_is_fused_warns_and_with_strict_raises(tmp_path: Any) -> None:
    def plain(x: Tensor) -> Tensor:
        return (x @ x).relu()

    with mock.patch.dict(os.environ):
        start_anew(str(tmp_path))
        with pytest.warns(UserWarning, match="this graph has no collective beside a matmul"):
            torch.compile(plain, options=symm_overlap.inductor.options())(torch.ones(4, 4))
        torch._dynamo.reset()
        with pytest.raises(NotFusedError, match="this graph has no collective beside a matmul"):
            torch.compile(plain, options=symm_overlap.inductor.options(strict=True))(torch.ones(4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_freezing_packs_are_named(tmp_path: Any, dtype: torch.dtype) -> None:
    with (
        fake_group(2) as name,
        mock.patch.dict(os.environ),
        torch._inductor.config.patch(freezing=True),
        torch.no_grad(),
    ):
        start_anew(str(tmp_path))
        linear = nn.Linear(16, 16).to(dtype).eval()
        compiled = torch.compile(
            lambda x: linear(all_gather_tensor(x, 0, name)), options=symm_overlap.inductor.options()
        )
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # then it packs none
            compiled(torch.ones(8, 16, dtype=dtype))
            assert [graph.fused for graph in symm_overlap.inductor.report().graphs] == [1]
            return
        with pytest.warns(UserWarning, match=r"0 of 1 collectives beside a matmul fused"):
            compiled(torch.ones(8, 16, dtype=dtype))
    ((site,),) = (graph.sites for graph in symm_overlap.inductor.report().graphs)
    assert site.reason.startswith("Inductor has packed the weight of this matmul (freezing)")


def test_a_graph_that_has_the_ops_already_is_nothing_to_warn_of() -> None:
    """A graph that already contains the library's ops causes no warning, and no error with ``strict``."""
    with fake_group(2) as name, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._dynamo.reset()
        compiled_up_to_the_pass(
            lambda x, B: symm_overlap.all_gather_matmul(x, [B], 0, name), OverlapPass(Choices(strict=True))
        )(torch.ones(3, 4), torch.ones(4, 5))


def test_the_graphs_of_branches_are_not_judged_alone(tmp_path: Any) -> None:
    """Inductor runs the pass on each branch, then on the graph around them. Two of the three have no collective."""
    with fake_group(2) as name, mock.patch.dict(os.environ), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="symm_overlap")
        start_anew(str(tmp_path))

        def program(x: Tensor, weight: Tensor) -> Tensor:
            def gathers(x: Tensor, weight: Tensor) -> Tensor:
                return all_gather_tensor(x, 0, name) @ weight

            def repeats(x: Tensor, weight: Tensor) -> Tensor:
                return torch.cat([x, x]) @ weight

            return torch.cond(x.sum() > 0, gathers, repeats, (x, weight))

        options = symm_overlap.inductor.options(strict=True)
        torch.compile(program, options=options)(torch.ones(3, 4), torch.ones(4, 5))
    assert sorted(len(graph.sites) for graph in symm_overlap.inductor.report().graphs) == [0, 0, 1]


c10d = torch.ops._c10d_functional


def gather_into(x: Tensor, weight: Tensor, name: str) -> Tensor:
    out = x.new_empty(2 * x.shape[0], x.shape[1])
    return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, name, out=out)) @ weight


def scatter_into(x: Tensor, weight: Tensor, name: str) -> Tensor:
    out = x.new_empty(x.shape[0] // 2, weight.shape[1])
    return c10d.wait_tensor(c10d.reduce_scatter_tensor_out(x @ weight, "sum", 2, name, out=out))


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 cannot compile an op that returns what it is given")
@pytest.mark.parametrize("program", [gather_into, scatter_into])
def test_a_collective_into_a_given_tensor(program: Callable[..., Tensor]) -> None:
    with fake_group(2) as name, torch.no_grad():
        torch._dynamo.reset()
        symm_overlap.inductor.clear()
        compiled = compiled_up_to_the_pass(program, OverlapPass(Choices(strict=True)))
        x, weight = torch.ones(6, 4), torch.ones(4, 5)
        assert compiled(x, weight, name).shape == program(x, weight, name).shape
        assert symm_overlap.inductor.report().fused == 1
