"""The matmuls that kernels can compute, extracted from consumers and producers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ....kernels.configuration import multiplies
from ....kernels.factor import Factor
from ...parts.products import Products
from ...parts.protocol import Consumer, Producer, RowProducer
from ...parts.rows import RowProducts
from ...parts.scaled import ScaledProducts, ScatteredScaledProducts
from ...parts.scattered import ScatteredProducts
from ...scaled import FLOAT8, Weight
from ..call import Call


class Matmul(NamedTuple):
    """The matmul of a reduction.

    Attributes:
        rows: (rows of all ranks, k), in rank order.
        row_scale: the scales of these rows, contiguous: one number, or one for each row. None if they are not scaled.
        factor: the matrix that they are multiplied with, and the output.
    """

    rows: Tensor
    row_scale: Tensor | None
    factor: Factor


def can_consume(call: Call, consumer: Consumer | None) -> bool:
    """True if a kernel can do the work of a consumer."""
    if isinstance(consumer, Products):
        return True
    return isinstance(consumer, ScaledProducts) and _can_multiply(call, consumer.weights)


def can_produce(call: Call, producer: Producer | RowProducer) -> bool:
    """True if a kernel can do the work of a producer."""
    if isinstance(producer, ScatteredProducts):
        return producer.is_one_matmul
    if isinstance(producer, RowProducts):
        return True
    found = producer.only_factors if isinstance(producer, ScatteredScaledProducts) else None
    return found is not None and _can_multiply(call, [found[2]])


def _can_multiply(call: Call, weights: Sequence[Weight]) -> bool:
    architecture, _ = call.backend.machine(call.lane.device)
    return all(multiplies(weight.B.dtype, architecture) for weight in weights)


def factors_of(call: Call, consumer: Products | ScaledProducts) -> tuple[list[Factor], Tensor | None]:
    """Return the factors that a consumer multiplies the gathered rows with, and the scales of those rows."""
    if isinstance(consumer, Products):
        each = zip(consumer.Bs, consumer.outputs, map(_contiguous, consumer.biases), strict=True)
        return [Factor(B, product, bias=bias) for B, product, bias in each], None
    pairs = zip(consumer.weights, consumer.outputs, strict=True)
    return [_scaled(call, weight, product) for weight, product in pairs], consumer.A_scale.contiguous()


def matmul_of(
    call: Call, producer: ScatteredProducts | ScatteredScaledProducts | RowProducts, product: Tensor
) -> Matmul:
    """Return the one matmul of a producer, with ``product`` as its output."""
    if isinstance(producer, RowProducts):
        return Matmul(producer.A, None, Factor(producer.B, product, bias=_contiguous(producer.bias)))
    if isinstance(producer, ScatteredProducts):
        return Matmul(producer.As[0], None, Factor(producer.Bs[0], product, bias=_contiguous(producer.biases[0])))
    found = producer.only_factors
    assert found is not None
    rows, row_scale, weight = found
    return Matmul(rows, row_scale.contiguous(), _scaled(call, weight, product))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _scaled(call: Call, weight: Weight, product: Tensor) -> Factor:
    result_scale = weight.result_scale if weight.dtype in FLOAT8 else None
    if result_scale is not None and call.backend.traits.divides_by_result_scale:
        result_scale = result_scale.reciprocal()
    return Factor(weight.B, product, weight.scale.contiguous(), _contiguous(weight.bias), weight.fast, result_scale)
