"""A compiler hands the ops inputs with the strides that the program gave them: those decide what has to be copied."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from symm_overlap.collective.layouts import GatherLayout
from symm_overlap.collective.registration import OPS
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap


def gather_turned(X: Tensor, B: Tensor, name: str) -> Tensor:
    turned = (X.transpose(0, 1) + 1).contiguous()  # for a compiler that may choose, it follows the strides of X
    return ops.fused_all_gather_matmul(turned, [B], 1, name, return_A=False)[1][0]


def strides_in_a_compiled_graph(me: Rank) -> list[tuple[int, ...]]:
    """Of the shard that the op is given: in eager mode, and compiled where ops without a tag may get any strides."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    seen: list[tuple[int, ...]] = []
    flat_shard = GatherLayout.flat_shard

    def watched(layout: GatherLayout, shard: Tensor) -> Tensor:
        seen.append(shard.stride())
        return flat_shard(layout, shard)

    X, B = ref.normal((3, 2, 4), torch.float32, me.rank), ref.normal((4, 5), torch.float32, 9)
    # The key of the cache does not have the tag. Headers are not worth compiling for one kernel.
    without_caches = {"force_disable_caches": True, "cpp_cache_precompile_headers": False}
    any_strides = functorch.patch(custom_op_default_layout_constraint="flexible_layout")
    with mock.patch.object(GatherLayout, "flat_shard", watched):
        expected = gather_turned(X, B, me.group_name)
        with any_strides, inductor.patch(without_caches):
            found = torch.compile(gather_turned, fullgraph=True, backend="inductor")(X, B, me.group_name)
    ref.same(found, expected)
    return seen


def test_an_input_keeps_its_strides_in_a_compiled_graph(fresh_ranks: Callable[..., Pool]) -> None:
    # A fresh rank, since a process keeps what its compiler has learnt of an op. One is enough to compile.
    assert fresh_ranks(1).run(1, strides_in_a_compiled_graph, timeout=120) == [[(12, 4, 1)] * 2]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_tag(op: str) -> None:
    assert torch.Tag.needs_fixed_stride_order in getattr(ops, op).default.tags
