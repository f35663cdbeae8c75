"""Small programs that reduce the elements of a product in another order. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, fused, gather, reduce, scatter
from tests.inductor.cast_cases import half_product
from tests.inductor.scaled_cases import scaled


@fused(1)
def scattered_after_a_transposition(world: int, name: str, new: New) -> Any:
    return scatter((new(6, 4) @ new(4, 2 * world)).t().contiguous(), world, name)


@fused(1)
def the_rank_s_part_is_cut_out_of_rows(world: int, name: str, new: New) -> Any:
    product = new(2 * world, 4) @ new(4, 6)
    return scatter(product.view(2, world, 6).permute(1, 2, 0).reshape(world, 12), world, name)


@fused(1, 1)
def a_sequence_is_outermost_in_what_travels_alone(world: int, name: str, new: New) -> Any:
    batches = gather(new(4, 3, 6), world, name).transpose(0, 1).reshape(-1, 6) @ new(6, 5)
    product = (batches @ new(5, 6)).view(3, 4 * world, 6)
    return scatter(product.transpose(0, 1).contiguous(), world, name)


@fused(1)
def windows_of_an_image(world: int, name: str, new: New) -> Any:
    windows = new(2 * world * 2 * 3, 4, 6) @ new(6, 5)
    images = windows.view(2 * world, 2, 3, 2, 2, 5).transpose(2, 3).reshape(2 * world, 4, 6, 5)
    return scatter(images, world, name)


@fused(2)
def two_products_and_a_bias_and_another_tensor(world: int, name: str, new: New) -> Any:
    one = torch.addmm(new(6), new(3 * 2 * world, 4), new(4, 6))
    two = new(3 * 2 * world, 5) @ new(5, 6)
    total = one.view(3, 2 * world, 6) + two.view(3, 2 * world, 6) + new(3, 2 * world, 6)
    return scatter(total.transpose(0, 1).reshape(2 * world, 18), world, name, "avg")


@fused(1)
def columns_of_a_product_and_then_its_rows(world: int, name: str, new: New) -> Any:
    product = new(2, 3, 4) @ new(4, 2 * world)
    return scatter(product.permute(2, 1, 0).contiguous(), world, name)


@fused(1)
def a_product_that_is_used_in_its_own_order_too(world: int, name: str, new: New) -> Any:
    product = new(3 * 2 * world, 4) @ new(4, 6)
    return scatter(product.view(3, 2 * world, 6).transpose(0, 1).contiguous(), world, name), product.relu()


@fused(1)
def a_cast_product_in_another_order(world: int, name: str, new: New) -> Any:
    product = half_product(3 * 2 * world, 5, new).view(3, 2 * world, -1).transpose(0, 1)
    return scatter(product.to(torch.float32).contiguous(), world, name)


@fused(1)
def a_scaled_product_in_another_order(world: int, name: str, new: New) -> Any:
    product = scaled(new, 4 * 4 * world, 16, 16)
    return scatter(product.view(4, 4 * world, 16).transpose(0, 1).contiguous(), world, name)


@fused(1)
def reduced_after_a_transposition(world: int, name: str, new: New) -> Any:
    return reduce((new(6, 4) @ new(4, 5)).t(), name)


@fused(1)
def all_reduced_with_the_sequence_outermost(world: int, name: str, new: New) -> Any:
    product = torch.addmm(new(3 * 7, 5), new(3 * 7, 4), new(4, 5))
    return reduce(product.view(3, 7, 5).transpose(0, 1).contiguous(), name).add(1)


@fused(2)
def two_transposed_products_and_another_tensor(world: int, name: str, new: New) -> Any:
    return reduce((new(6, 4) @ new(4, 5)).t() + (new(6, 3) @ new(3, 5)).t() + new(6, 5).t(), name)
