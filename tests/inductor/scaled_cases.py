"""Small programs with float8 matmuls. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from tests.inductor.cases import New, fused, gather, reduce, scatter, skipped

# On CPU, torch 2.11 supports only one scale for a whole tensor.
SCALES_OF_ROWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def scales(new: New, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a scale for each row and one for each column, or one for each tensor if torch supports no others."""
    shapes = ((rows, 1), (1, columns)) if SCALES_OF_ROWS else ((1,), (1,))
    of_rows, of_columns = (new(*shape).float() + 1 for shape in shapes)
    return of_rows, of_columns


def float8(new: New, *shape: int) -> Tensor:
    return new(*shape).to(torch.float8_e4m3fn)


def scaled(new: New, rows: int, inner: int, columns: int, **options: Any) -> Tensor:
    """Return a product of float8 matrices, with the scales of `scales`."""
    of_rows, of_columns = scales(new, rows, columns)
    A, B = float8(new, rows, inner), float8(new, columns, inner).t()
    return torch._scaled_mm(A, B, of_rows, of_columns, out_dtype=torch.float32, **options)


def with_recipe(new: New, x: Tensor, of_x: Tensor, of_weight: Tensor, recipe: ScalingType, **options: Any) -> Tensor:
    weight = float8(new, 8, x.shape[1]).t()
    return scaled_mm(x, weight, of_x, recipe, of_weight, recipe, output_dtype=torch.float32, **options)


def gather_float8(x: Tensor, world: int, name: str) -> Tensor:
    """Gather the tensor as bytes, because gloo does not support float8."""
    return gather(x.view(torch.uint8), world, name).view(torch.float8_e4m3fn)


@fused(2)
def gather_float8_with_one_scale_for_two_weights(world: int, name: str, new: New) -> Any:
    whole, scale = gather_float8(float8(new, 4, 16), world, name), new(1).float().sum() + 1
    weights = [float8(new, columns, 16).t() for columns in (8, 4)]
    return [torch._scaled_mm(whole, weight, scale, scale + 1, out_dtype=torch.float32) for weight in weights]


@fused(1)
def bytes_that_are_read_as_two_dtypes(world: int, name: str, new: New) -> Any:
    whole, one = gather(float8(new, 4, 16).view(torch.uint8), world, name), new(1).float().sum() * 0 + 1
    return [
        torch._scaled_mm(whole.view(dtype), float8(new, 8, 16).t(), one, one, out_dtype=torch.float32)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    ]


@fused(1)
def gather_float8_as_bytes_with_a_scale_for_each_row(world: int, name: str, new: New) -> Any:
    whole = gather(float8(new, 2, 4, 16).view(torch.uint8), world, name)
    rows = torch.cat(whole.split(2), 1)
    flat = rows.view(torch.float8_e4m3fn).view(-1, 16)
    of_rows, of_columns = scales(new, 8 * world, 4)
    weight = float8(new, 4, 16).t()
    return torch._scaled_mm(flat, weight, of_rows, of_columns, out_dtype=torch.float32), rows


@fused(1)
def chunks_of_gathered_float8_are_concatenated_as_bytes(world: int, name: str, new: New) -> Any:
    """This is how torchao's tensor parallelism gathers a batch of sequences."""
    chunks = gather_float8(float8(new, 2, 4, 16), world, name).split(2)
    whole = torch.cat([chunk.view(torch.uint8) for chunk in chunks], 1).view(torch.float8_e4m3fn)
    scale, weight = new(1).float().sum() + 1, float8(new, 8, 16).t()
    return torch._scaled_mm(whole.flatten(0, 1), weight, scale, scale + 1, out_dtype=torch.float32)


@fused(1)
def gather_float8_for_two_weights_with_scales_of_their_own(world: int, name: str, new: New) -> Any:
    whole, weight = gather_float8(float8(new, 4, 16), world, name), float8(new, 8, 16).t()
    scales = [new(1).float().sum() + 1 for _ in range(3)]
    return [torch._scaled_mm(whole, weight, scale, scales[2], out_dtype=torch.float32) for scale in scales[:2]]


@fused(1)
def scatter_a_scaled_product(world: int, name: str, new: New) -> Any:
    return scatter(scaled(new, 4 * world, 16, 8), world, name)


@fused(1)
def scatter_a_scaled_product_along_dim_1(world: int, name: str, new: New) -> Any:
    product = scaled(new, 2 * 3 * world, 16, 8).view(2, 3 * world, 8)
    return scatter(torch.cat(product.split(3, 1)), world, name, "avg")


@fused(1)
def scatter_columns_of_a_scaled_product(world: int, name: str, new: New) -> Any:
    product = scaled(new, 6, 16, 16 * world)
    return scatter(torch.cat(product.split(16, 1)), world, name)


def quantised(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor as float8, and its scale."""
    scale = largest.float().clamp(min=1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def multiplied(new: New, x: Tensor, scale: Tensor, *widths: int) -> list[Tensor]:
    x = x.reshape(-1, x.shape[-1])
    scale = scale.reshape(() if scale.numel() == 1 else (-1, 1))
    products = []
    for width in widths or (8,):
        weight = float8(new, width, x.shape[-1]).t()
        of_weight = torch.ones(()) if scale.numel() == 1 else torch.ones(1, width)
        products.append(torch._scaled_mm(x, weight, scale, of_weight, out_dtype=torch.float32))
    return products


@fused(1)
def a_gathered_tensor_is_quantised(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    return multiplied(new, *quantised(whole, whole.abs().max()))


@fused(1)
def a_tensor_gathered_in_dim_1_is_quantised(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 16), world, name).split(2), 1)
    x, scale = quantised(whole.reshape(-1, 16), whole.abs().amax())
    return multiplied(new, x, scale), x.view(torch.uint8)


@fused(1)
def rows_are_quantised(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    x, scale = quantised(whole, whole.abs().amax(-1, keepdim=True))
    return (multiplied(new, x, scale) if SCALES_OF_ROWS else multiplied(new, x, scale.amax())), scale


@fused(2)
def rows_gathered_in_dim_1_are_quantised_for_two_weights(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 16), world, name).split(2), 1)
    x, scale = quantised(whole, torch.maximum(whole.amax(2), -whole.amin(-1)).unsqueeze(-1))
    scale = scale if SCALES_OF_ROWS else scale.amax()
    return multiplied(new, x, scale, 8, 16)


@skipped("a scale that is not computed from the maximum of each row or of the whole tensor")
def it_is_quantised_with_a_scale_that_is_given(world: int, name: str, new: New) -> Any:
    return multiplied(new, *quantised(gather(new(4, 16), world, name), new(1).abs() + 1))


@skipped("a scale that is not computed from the maximum of each row or of the whole tensor")
def columns_are_quantised_by_the_largest_of_the_first_row(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    return multiplied(new, *quantised(whole, whole[0].abs().amax()))


@skipped("something else uses it before it is quantised")
def a_gathered_tensor_is_quantised_and_saved(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    return multiplied(new, *quantised(whole, whole.abs().max())), whole


@skipped("something else uses it before it is quantised")
def the_largest_of_each_column_is_needed_too(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    return multiplied(new, *quantised(whole, whole.abs().max())), whole.abs().amax(0)


@skipped("no matmul uses the gathered tensor on its left", candidate=False)
def columns_are_quantised_each_by_its_largest(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    x, scale = quantised(whole, whole.abs().amax(0))
    return multiplied(new, x, scale.amax())


@fused(1)
def a_scaled_matmul_that_is_all_reduced(world: int, name: str, new: New) -> Any:
    return reduce(scaled(new, 2 * world, 16, 4), name)


@fused(1)
def a_scaled_matmul_and_another_one_are_added(world: int, name: str, new: New) -> Any:
    return scatter(scaled(new, 4 * world, 16, 4) + new(4 * world, 3).float() @ new(3, 4).float(), world, name)


@fused(2)
def scaled_matmuls_that_are_added(world: int, name: str, new: New) -> Any:
    return scatter(scaled(new, 4 * world, 16, 4) + scaled(new, 4 * world, 32, 4), world, name)


@fused(3)
def scaled_matmuls_a_bias_and_a_residual_are_added_and_scattered_along_dim_1(world: int, name: str, new: New) -> Any:
    bias, residual = new(8).float(), new(2, 3 * world, 8).float()
    q, k, v = (scaled(new, 2 * 3 * world, 16, 8, bias=each).view(2, 3 * world, 8) for each in (bias, None, None))
    return scatter(torch.cat((residual + (q + k + v)).split(3, 1)), world, name, "avg")


@fused(1)
def a_scaled_matmul_and_a_residual_are_added(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 4).float() + scaled(new, 4 * world, 16, 4), world, name)


@fused(2)
def columns_of_scaled_matmuls_that_are_added(world: int, name: str, new: New) -> Any:
    total = scaled(new, 6, 16, 16 * world) + scaled(new, 6, 16, 16 * world)
    return scatter(torch.cat(total.split(16, 1)), world, name)


@fused(2)
def scaled_matmuls_that_are_added_and_all_reduced(world: int, name: str, new: New) -> Any:
    total = scaled(new, 6 * world, 16, 4) + scaled(new, 6 * world, 16, 4)
    return reduce(total.view(3, 2 * world, 4), name)


if SCALES_OF_ROWS:  # torch 2.11 also lacks the new scaled_mm on CPU

    @fused(1, 2)
    def matmuls_with_recipes(world: int, name: str, new: New) -> Any:
        whole = gather_float8(float8(new, 4, 16), world, name)
        of_rows, of_columns = scales(new, 4 * world, 8)
        y = with_recipe(new, whole, of_rows, of_columns, ScalingType.RowWise, bias=new(8).float())
        one, two = (float8(new, 4 * world, 16) for _ in range(2))
        scale = new(1).float() + 1
        parts = [with_recipe(new, x, scale, scale, ScalingType.TensorWise) for x in (one, two)]
        return y, scatter(parts[0] + parts[1], world, name)


@skipped("the other matrix depends on the gathered tensor too")
def a_scale_that_depends_on_the_gathered_tensor(world: int, name: str, new: New) -> Any:
    whole = gather_float8(float8(new, 4, 16), world, name)
    scale = whole.float().abs().amax() + 1
    return torch._scaled_mm(
        whole, float8(new, 8, 16).t(), scale, new(1).float().sum().abs() + 1, out_dtype=torch.float32
    )
