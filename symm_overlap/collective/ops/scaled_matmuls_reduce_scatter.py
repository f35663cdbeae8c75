"""``fused_scaled_matmuls_reduce_scatter``: scatter the sum of a tensor and several products of float8 tensors, in one
exchange.

Problem: in float8 the gradients of q, k and v, or of gate and up, are products of one ``torch._scaled_mm`` each. They
    are added up and scattered, as in `matmuls_reduce_scatter` for other dtypes.

Algorithm: as for `matmul_reduce_scatter`. ``torch._scaled_mm`` cannot accumulate into an existing tensor. So every
    product is rounded to ``out_dtype`` before it is added, and every sum is rounded too: first the products in their
    order, then the addend. Equivalent to::

        products = [A @ B * A_scale * B_scale + bias for A, B, A_scale, B_scale, bias in zip(...)]
        reduce_scatter(sum(products) + addend, reduce_op, scatter_dim, group)

Routing: `symm_overlap.collective.choosing.chooser`.
Example: ``Y = torch.ops.symm_overlap.fused_scaled_matmuls_reduce_scatter([A, C], [B, D], [a, c], [b, d], [None, None],
    [None, None], None, "sum", 0, group.group_name, torch.bfloat16, [False, False])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import dimension, remembered, require_divisible, require_reduce_op
from ..dispatch.registration import define
from ..exchange import Call, Peers, exchange_of
from ..parts.scaled import ScatteredScaledProducts
from ..parts.scattered import matrix
from ..problem import OPS, OpKind, problem
from ..scaled import ScaledMatmul, keep_nothing, require_multiplies, weights_of, without_gradient
from . import flop
from .matmul_reduce_scatter import Scattered, scattered_shape, summands

OPS["scaled_matmul_reduce_scatter"] = OpKind(multiplies=True, scaled=True, fused=True)

Outputs = tuple[Tensor, list[Tensor], Tensor | None]
"""This rank's part, the products that are kept, and the sum if it is kept."""


def scaled_sum(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    A_scales: Sequence[Tensor],
    B_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype,
    use_fast_accum: Sequence[bool],
) -> tuple[list[ScaledMatmul], Tensor | None, str, int]:
    """Return one record for each product, the addend, the reduce op, and the scatter dimension.

    Raises:
        ValueError: the lists are empty or differ in length.
    """
    for name, values in {"As": As, "A_scales": A_scales}.items():
        if len(values) != len(Bs):
            raise ValueError(
                f"{name} has {len(values)} entries and Bs has {len(Bs)}: there must be one for each product"
            )
    weights = weights_of(out_dtype, Bs, B_scales, biases, result_scales, [out_dtype] * len(Bs), use_fast_accum)
    return list(map(ScaledMatmul, As, A_scales, weights)), addend, reduce_op, scatter_dim


def require_scaled_sum(
    matmuls: Sequence[ScaledMatmul], addend: Tensor | None, reduce_op: str, scatter_dim: int, world: int
) -> tuple[list[int], int]:
    """Return the shape of every product, and the dimension. Raises ValueError or TypeError if there is no such sum."""
    shapes = [matmul.shape(f"As[{index}]", f"Bs[{index}]") for index, matmul in enumerate(matmuls)]
    A, dtype = matmuls[0].A, matmuls[0].weight.dtype
    for index, matmul in enumerate(matmuls[1:], 1):
        if matmul.A.device != A.device:
            raise TypeError(
                f"As[{index}] is on {matmul.A.device} and As[0] is on {A.device}: they must be on one device"
            )
    if addend is not None:
        if (addend.dtype, addend.device) != (dtype, A.device):
            raise TypeError(
                f"addend is {addend.dtype} on {addend.device}, and the products are {dtype} on {A.device}: dtype and "
                "device must be the same"
            )
        shapes.append(list(addend.shape))
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise ValueError(f"products (and the addend) must have one shape: got {shapes}")
    require_reduce_op(reduce_op)
    scatter_dim = dimension("scatter_dim", scatter_dim, shapes[0])
    require_divisible(scatter_dim, shapes[0], world)
    return shapes[0], scatter_dim


@remembered
def _described(
    matmuls: Sequence[ScaledMatmul],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    world: int,
    keep: Sequence[int],
    keep_sum: bool,
) -> tuple[Scattered, list[int]]:
    """Return the reduction, and the shape of the products."""
    shape, scatter_dim = require_scaled_sum(matmuls, addend, reduce_op, scatter_dim, world)
    kept = (("keep", tuple(keep)), ("keep_sum", keep_sum)) if keep or keep_sum else ()
    described = problem(
        "scaled_matmul_reduce_scatter",
        prod(shape[:-1]),
        shape[-1],
        sum(matmul.A.shape[-1] for matmul in matmuls),
        matmuls[0].weight.dtype,
        world,
        matmuls[0].A.device.type,
        last_dim=scatter_dim == len(shape) - 1,
        one_matmul=len(matmuls) == 1 and addend is None and not kept,
        arguments=(
            *summands(shape, len(matmuls), addend),
            ("reduce_op", reduce_op),
            ("scatter_dim", scatter_dim),
            *kept,
        ),
        own=tuple(each.shape for matmul in matmuls for each in (matmul.A, matmul.weight.B)),
    )
    part = scattered_shape(shape, scatter_dim, world)
    return Scattered(described, scatter_dim, part, reduce_op == "avg", described.dtype), shape


def scatter_scaled_sum(
    peers: Peers,
    matmuls: Sequence[ScaledMatmul],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    keep: Sequence[int] = (),
    keep_sum: bool = False,
) -> Outputs:
    """Return this rank's part of the sum over ranks, and the tensors that are kept."""
    scattered, shape = _described(matmuls, addend, reduce_op, scatter_dim, peers.world, keep, keep_sum)
    for A, scale, weight in matmuls:
        require_multiplies(A, scale, scale.numel(), weight)
    A = matmuls[0].A
    call = Call(peers, scattered.problem, A.device)
    output = call.backend.new_output(A.new_empty(0, dtype=scattered.dtype), *scattered.part)
    producer = ScatteredScaledProducts(
        call.backend, matmuls, addend, shape, scattered.scatter_dim, peers.world, keep, keep_sum
    )
    exchange_of(call).reduce_scatter(call, producer, matrix(output), scattered.average)
    products = [product.view(shape) for product in producer.products.values()]
    return output, products, None if producer.total is None else producer.total.view(shape)


def fake_scaled_sum(
    world: int,
    matmuls: Sequence[ScaledMatmul],
    addend: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    keep: Sequence[int] = (),
    keep_sum: bool = False,
) -> Outputs:
    """Return outputs like those of `scatter_scaled_sum`, without data."""
    shape, scatter_dim = require_scaled_sum(matmuls, addend, reduce_op, scatter_dim, world)
    A, dtype = matmuls[0].A, matmuls[0].weight.dtype
    output = A.new_empty(scattered_shape(shape, scatter_dim, world), dtype=dtype)
    products = [A.new_empty(shape, dtype=dtype) for _ in keep]
    return output, products, A.new_empty(shape, dtype=dtype) if keep_sum else None


def _eager(peers: Peers, *arguments: Any) -> Tensor:
    return scatter_scaled_sum(peers, *scaled_sum(*arguments))[0]


def _fake(world: int, *arguments: Any) -> Tensor:
    return fake_scaled_sum(world, *scaled_sum(*arguments))[0]


ARGUMENTS = (
    "(Tensor[] As, Tensor[] Bs, Tensor[] A_scales, Tensor[] B_scales, Tensor?[] biases, Tensor?[] result_scales, "
    "Tensor? addend, str reduce_op, int scatter_dim, str group_name, ScalarType out_dtype, bool[] use_fast_accum"
)

define(
    "fused_scaled_matmuls_reduce_scatter",
    f"{ARGUMENTS}) -> Tensor",
    eager=_eager,
    fake=_fake,
    setup_context=keep_nothing,
    backward=without_gradient("fused_scaled_matmuls_reduce_scatter", "fused_matmuls_reduce_scatter"),
    flop=flop.of_products,
)
