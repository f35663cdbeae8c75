"""torch may load a compiled graph from its cache. It must be the right graph, and its report must be available."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.settings import environment
from tests.collective.test_fake_group import fake_group
from tests.inductor.test_compile import fresh, start_anew
from tests.inductor.test_models import step
from tests.ranks import Pool, Rank
from tests.transforms import comparing


def forget_what_was_loaded() -> None:
    """Clear everything that a new process would not have in memory. The files of the cache stay."""
    torch._dynamo.reset()
    counters.clear()
    symm_overlap.inductor.clear()


def twice_with_the_cache(me: Rank, folder: str) -> list[list[bool]]:
    was_cached = []
    for _ in range(2):
        module, x = fresh(me, folder)
        forget_what_was_loaded()
        with comparing(False):
            found = step(torch.compile(module, options=symm_overlap.inductor.options(timeout=100)), module, x)
        for one, other in zip(found, step(module, module, x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        graphs = symm_overlap.inductor.report().graphs
        assert [graph.fused for graph in graphs] == [2, 2]
        assert all("models.py:" in site.where for graph in graphs for site in graph.sites)
        was_cached.append([graph.cached for graph in graphs])
        dist.barrier(me.group)
    return was_cached


@pytest.mark.slow
def test_graphs_of_the_cache_compute_the_same_and_report_what_they_hold(ranks: Pool, tmp_path: Any) -> None:
    found = ranks.run(2, twice_with_the_cache, str(tmp_path), timeout=240)
    assert [was_cached[1] for was_cached in found] == [[True, True]] * 2
    assert [False, False] in [was_cached[0] for was_cached in found]  # a rank may find the other's graphs


def test_a_cached_graph_is_used_only_for_its_world_size_and_its_settings(tmp_path: Any) -> None:
    def one(world: int, **options: Any) -> list[bool]:
        start_anew(str(tmp_path))
        forget_what_was_loaded()
        with fake_group(world) as name:

            def program(x: Tensor, weight: Tensor) -> Tensor:
                return all_gather_tensor(x, 0, name) @ weight

            compiled = torch.compile(program, options=symm_overlap.inductor.options(**options))
            assert compiled(torch.ones(3, 4), torch.ones(4, 5)).shape == (3 * world, 5)
        return [graph.cached for graph in symm_overlap.inductor.report().graphs]

    with mock.patch.dict(os.environ):
        assert one(2) == [False]
        assert one(2) == [True]
        assert one(4) == [False], "the group has the same name, but another size"
        assert one(2, lane=1) == [False]
        assert one(2, strict=True) == [False]
        assert one(2) == [True]


def test_a_cached_graph_in_which_nothing_was_fused_warns_and_is_reported(tmp_path: Any) -> None:
    def alone(x: Tensor) -> Tensor:
        return (x @ x).relu()

    def largest(x: Tensor, weight: Tensor) -> Tensor:
        return reduce_scatter_tensor(x @ weight, "max", 0, name)

    def complaints(program: Any, *inputs: Tensor) -> list[str]:
        forget_what_was_loaded()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.compile(program, options=symm_overlap.inductor.options())(*inputs)
        return [str(one.message) for one in caught if str(one.message).startswith("symm_overlap")]

    with mock.patch.dict(os.environ), fake_group(2) as name:
        start_anew(str(tmp_path))
        for program, text in ((alone, "no collective beside a matmul"), (largest, "the reduction is 'max'")):
            for was_cached in (False, True):
                (complaint,) = complaints(program, *[torch.ones(4, 4)] * (1 + (program is largest)))
                assert text in complaint
                (graph,) = symm_overlap.inductor.report().graphs
                assert graph.cached == was_cached
                assert len(graph.candidates) == (program is largest)


def test_a_report_is_found_though_the_counters_were_cleared(tmp_path: Any) -> None:
    """The report of a cached graph is found even if the program has cleared torch's counters."""
    with mock.patch.dict(os.environ), fake_group(2) as name:

        def program(x: Tensor) -> Tensor:
            return all_gather_tensor(x, 0, name) @ x

        start_anew(str(tmp_path))
        counters.clear()
        symm_overlap.inductor.clear()
        for _ in range(3):
            torch._dynamo.reset()
            torch.compile(program, options=symm_overlap.inductor.options())(torch.ones(4, 4))
            counters.clear()
        assert [graph.cached for graph in symm_overlap.inductor.report().graphs] == [False, True, True]


def test_the_key_of_cached_graphs_depends_on_groups_choices_and_passes() -> None:
    keys = []
    for world in (2, 4):
        with fake_group(world):
            keys += [OverlapPass(Choices(strict)).uuid() for strict in (False, True)]
    assert len({str(key) for key in keys}) == 4
    own = OverlapPass(Choices())
    assert OverlapPass(Choices()).uuid() == own.uuid()
    key = own.uuid()
    with mock.patch.dict(os.environ, SYMM_OVERLAP_PATH="sequential"):
        environment.cache_clear()
        assert own.uuid() != key, "with this setting, small sites are fused too"
    environment.cache_clear()
    assert OverlapPass(Choices(), before=own).uuid() not in (None, own.uuid())
    assert OverlapPass(Choices(), before=lambda graph: None).uuid() is None, "a pass without a key prevents caching"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def layers_one_by_one(me: Rank, folder: str) -> None:
    """The first layer gets a DTensor whose collective is still running, the second one a finished DTensor."""
    start_anew(folder)
    torch.manual_seed(0)
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    }
    for layer in "12":
        up = ColwiseParallel(input_layouts=Shard(1))
        plan |= {f"{layer}.norm": SequenceParallel(), f"{layer}.up": up, f"{layer}.down": rows}
    model = nn.Sequential(nn.Embedding(32, 16), Layer(), Layer())
    parallelize_module(model, DeviceMesh.from_group(me.group, "cpu"), plan)
    x = torch.randint(0, 32, (2, 8))

    def run() -> list[Tensor]:
        model.zero_grad()
        y = model(x).full_tensor()
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())]

    expected = run()
    for each in list(model)[1:]:
        each.compile(fullgraph=True)
    with symm_overlap.inductor.enabled(), comparing(False):
        found = run()
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_equal_layers_that_are_compiled_one_by_one(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(2, layers_one_by_one, str(tmp_path), timeout=240)
