"""In a compiled graph, ops get inputs with the program's own strides. The strides decide which inputs are copied."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from symm_overlap.collective.dispatch.direct_call import KERNELS
from symm_overlap.collective.layouts import GatherLayout
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

ops = torch.ops.symm_overlap


def gather_turned(X: Tensor, B: Tensor, name: str) -> Tensor:
    turned = (X.transpose(0, 1) + 1).contiguous()  # a compiler that may choose keeps X's strides
    return ops.fused_all_gather_matmul(turned, [B], 1, name, return_A=False)[1][0]


def strides_in_a_compiled_graph(me: Rank) -> list[tuple[int, ...]]:
    """Return the strides of the shard that the op gets, in eager mode and compiled.

    The compiler is set so that an op without the tag ``needs_fixed_stride_order`` may get inputs with any strides.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    seen: list[tuple[int, ...]] = []
    flat_shard = GatherLayout.flat_shard

    def watched(layout: GatherLayout, shard: Tensor) -> Tensor:
        seen.append(shard.stride())
        return flat_shard(layout, shard)

    X, B = ref.normal((3, 2, 4), torch.float32, me.rank), ref.normal((4, 5), torch.float32, 9)
    # Caches are off because their key does not include the tag. Precompiled headers do not pay for one kernel.
    without_caches = {"force_disable_caches": True, "cpp_cache_precompile_headers": False}
    any_strides = functorch.patch(custom_op_default_layout_constraint="flexible_layout")
    with mock.patch.object(GatherLayout, "flat_shard", watched):
        expected = gather_turned(X, B, me.group_name)
        with any_strides, inductor.patch(without_caches):
            found = torch.compile(gather_turned, fullgraph=True, backend="inductor")(X, B, me.group_name)
    ref.same(found, expected)
    return seen


@pytest.mark.slow
def test_an_input_keeps_its_strides_in_a_compiled_graph(fresh_ranks: Callable[..., Pool]) -> None:
    # The rank is fresh because the compiler caches what it knows of an op per process. One rank is enough to compile.
    assert fresh_ranks(1).run(1, strides_in_a_compiled_graph, timeout=120) == [[(12, 4, 1)] * 2]


@pytest.mark.parametrize("op", KERNELS, ids=str)
def test_every_op_has_the_tag(op: torch._ops.OpOverload) -> None:
    assert torch.Tag.needs_fixed_stride_order in op.tags
