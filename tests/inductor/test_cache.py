"""Graphs that torch takes from its cache: the right ones, with their reports."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch.distributed._functional_collectives import all_gather_tensor

import symm_overlap
from symm_overlap.inductor import cached
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.collective.test_fake_group import fake_group
from tests.inductor.test_compile import fresh, start_anew
from tests.inductor.test_models import step
from tests.ranks import Pool, Rank
from tests.transforms import comparing


def forget_what_was_loaded() -> None:
    """What a new process does not know. The files of the cache stay."""
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    cached._read.clear()
    cached._here.clear()
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


def test_graphs_of_the_cache_compute_the_same_and_report_what_they_hold(ranks: Pool, tmp_path: Any) -> None:
    found = ranks.run(2, twice_with_the_cache, str(tmp_path), timeout=240)
    assert [was_cached[1] for was_cached in found] == [[True, True]] * 2
    assert [False, False] in [was_cached[0] for was_cached in found]  # one rank may have been first


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
        assert one(4) == [False], "the same group's name, and another size"
        assert one(2, lane=1) == [False]
        assert one(2, strict=True) == [False]
        assert one(2) == [True]


def test_the_key_of_cached_graphs_depends_on_groups_choices_and_passes() -> None:
    keys = []
    for world in (2, 4):
        with fake_group(world):
            keys += [OverlapPass(Choices(strict)).uuid() for strict in (False, True)]
    assert len({str(key) for key in keys}) == 4
    own = OverlapPass(Choices())
    assert OverlapPass(Choices()).uuid() == own.uuid()
    assert OverlapPass(Choices(), before=own).uuid() not in (None, own.uuid())
    assert OverlapPass(Choices(), before=lambda graph: None).uuid() is None, "a pass without a key: nothing is cached"
