"""Ranks may have different numbers of features: nothing of that size travels.

This happens if the ranks cannot share the features of a layer evenly, as with torch's ``ColwiseParallel`` and
``RowwiseParallel`` around activations whose width is no multiple of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

import symm_overlap
from tests.collective import reference as ref
from tests.collective.scaled_cases import ONE, float8, weight
from tests.collective.test_fused import fused
from tests.ranks import Pool, Rank
from tests.transforms import comparing

PATHS = [None, ("sequential", 1, 1), ("pipelined", 2, 1), ("pipelined", 2, 2), ("fused", 2, 1), ("c10d", 2, 1)]
FEATURES = (5, 4, 0)  # of each rank
SHAPE = 12, 6, 3

Path = tuple[str, int, int] | None
Layers = Callable[[Tensor, Sequence[Tensor]], Tensor]


def on_path(path: Path) -> AbstractContextManager[None]:
    if path is None:
        return symm_overlap.force_path(None)
    if path[0] == "fused":
        return fused(path[1])
    return symm_overlap.force_path(path[0], chunks=path[1], streams=path[2])


def trained(layers: Layers, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of all tensors."""
    x, *weights = leaves = [each.clone().requires_grad_() for each in tensors]
    out = layers(x, weights)
    grad = ref.binary(out.shape, out.dtype, seed=90)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(me: Rank, path: Path, overlap: Layers, plain: Layers, tensors: Sequence[Tensor]) -> None:
    expected = trained(plain, tensors)
    with on_path(path):
        for _ in range(3):
            for found, right in zip(trained(overlap, tensors), expected, strict=True):
                assert torch.equal(found, right)


def weights_of(me: Rank, *shapes: tuple[int, int]) -> list[Tensor]:
    return [ref.binary(shape, torch.float32, seed=10 * place + me.rank) for place, shape in enumerate(shapes, 2)]


def block(me: Rank, path: Path) -> None:
    """Gather, multiply by two weights, multiply and scatter, along each dimension."""
    features = FEATURES[me.rank]
    for dim in range(3):
        rows = SHAPE[-1] * (me.world if dim == 2 else 1)
        tensors = [
            ref.binary(SHAPE, torch.float32, me.rank),
            *weights_of(me, *2 * [(rows, features)], (features, rows)),
        ]

        def overlap(x: Tensor, weights: Sequence[Tensor], dim: int = dim) -> Tensor:
            up, side, down = weights
            _, (h, g) = symm_overlap.all_gather_matmul(x, [up, side], dim, me.group, return_A=False)
            return symm_overlap.matmul_reduce_scatter(h * g, down, "sum", dim, me.group)

        def plain(x: Tensor, weights: Sequence[Tensor], dim: int = dim) -> Tensor:
            up, side, down = weights
            whole = symm_overlap.all_gather(x, dim, me.group)
            return symm_overlap.reduce_scatter((whole @ up * (whole @ side)) @ down, "sum", dim, me.group)

        compare(me, path, overlap, plain, tensors)


def replicated(me: Rank, path: Path) -> None:
    """Multiply twice, and sum over ranks."""
    features = FEATURES[me.rank]
    tensors = [ref.binary(SHAPE, torch.float32, 1), *weights_of(me, (SHAPE[-1], features), (features, 7))]

    def overlap(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return symm_overlap.matmul_all_reduce(x @ weights[0], weights[1], "sum", me.group)

    def plain(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return symm_overlap.all_reduce(x @ weights[0] @ weights[1], "sum", me.group)

    compare(me, path, overlap, plain, tensors)


def summed(me: Rank, path: Path) -> None:
    """Add two products, and then two whose sizes are exchanged, so that only the sum of the sizes is the same."""
    features, dim = FEATURES[me.rank], 1
    with on_path(path):
        for sizes in ((features, 3), (3, features), (features, 3)):
            As = [ref.binary((*SHAPE[:-1], size), torch.float32, seed=me.rank + size) for size in sizes]
            Bs = [ref.binary((size, 7), torch.float32, seed=20 + me.rank + size) for size in sizes]
            op = torch.ops.symm_overlap.fused_matmuls_reduce_scatter
            found = op(As, Bs, None, "sum", dim, me.group_name)
            product = As[0] @ Bs[0] + As[1] @ Bs[1]
            assert torch.equal(found, symm_overlap.reduce_scatter(product, "sum", dim, me.group))
            found = torch.ops.symm_overlap.fused_matmuls_all_reduce(As, Bs, None, "sum", me.group_name)
            assert torch.equal(found, symm_overlap.all_reduce(product, "sum", me.group))


def scaled(me: Rank, path: Path) -> None:
    features = 16 * FEATURES[me.rank] + 16
    A, up, down = float8(6, 32, seed=me.rank), weight(32, features, me.rank), weight(features, 16, me.rank)
    hidden = float8(18, features, seed=me.rank)
    gathered = torch.cat([float8(6, 32, seed=rank).view(torch.uint8) for rank in range(me.world)]).view(A.dtype)
    product = torch._scaled_mm(hidden, down, ONE, ONE, out_dtype=torch.bfloat16)
    total = symm_overlap.reduce_scatter(product, "sum", 0, me.group)
    with on_path(path):
        for _ in range(3):
            _, (found,) = symm_overlap.all_gather_scaled_matmul(A, [up], ONE, [ONE], 0, me.group)
            right = torch._scaled_mm(gathered, up, ONE, ONE, out_dtype=found.dtype)
            torch.testing.assert_close(found, right, rtol=0, atol=0)
            found = symm_overlap.scaled_matmul_reduce_scatter(
                hidden, down, ONE, ONE, "sum", 0, me.group, out_dtype=torch.bfloat16
            )
            assert torch.equal(found, total)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("layers", [block, replicated, summed, scaled])
def test_layers_whose_features_the_ranks_cannot_share_evenly(
    ranks: Pool, layers: Callable[[Rank, Path], None], path: Path
) -> None:
    if path is not None and path[0] == "fused":
        pytest.importorskip("triton")
    ranks.run(3, layers, path)


def compared(me: Rank) -> None:
    with comparing(True):
        block(me, None)
        replicated(me, None)


def test_the_comparison_of_calls_ignores_features(ranks: Pool) -> None:
    ranks.run(3, compared)
