"""Small programs with copies and casts of gathered tensors and of products, as autocast makes them.

See `tests.inductor.cases`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.inductor.cases import New, fused, gather, reduce, scatter, skipped

HALF = torch.float16  # not wider than the tensors of any test


@fused(1)
def copies_of_a_gathered_tensor(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    return whole @ new(6, 5), whole, whole.clone(), whole.t().clone()


@fused(2)
def a_cast_between_a_gather_and_two_matmuls(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name).to(HALF)
    return whole @ new(6, 5).to(HALF), whole @ new(6, 3).to(HALF), whole


@fused(1)
def a_cast_of_chunks_that_are_concatenated(world: int, name: str, new: New) -> Any:
    """This is how DTensor gathers dimension 1."""
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1)
    return whole.to(HALF).view(-1, 6) @ new(6, 5).to(HALF)


@fused(2)
def each_matmul_has_a_cast_of_its_own(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    return whole.to(HALF) @ new(6, 5).to(HALF), whole.to(HALF) @ new(6, 3).to(HALF)


@fused(1)
def casts_that_are_outputs(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    cast = whole.to(HALF)
    return cast @ new(6, 5).to(HALF), cast, whole.to(HALF), whole.t().to(HALF), whole.view(-1).to(HALF)


@fused(1)
def a_cast_before_chunks_are_concatenated(world: int, name: str, new: New) -> Any:
    chunks = gather(new(2, 4, 6), world, name).to(HALF).split(2)
    return torch.cat(chunks, 1).view(-1, 6) @ new(6, 5).to(HALF)


@fused(1)
def a_cast_that_keeps_device_and_format(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    cast = torch.ops.aten._to_copy(whole, dtype=HALF, device=whole.device, memory_format=torch.preserve_format)
    return cast @ new(6, 5).to(HALF)


@fused(1)
def a_cast_before_the_gradient_of_a_weight(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name).to(HALF).t() @ new(4 * world, 5).to(HALF)


@skipped("it is cast to torch.float16 before a matmul, and something else uses it without the cast")
def a_gathered_tensor_that_is_used_without_the_cast_too(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    return whole.to(HALF) @ new(6, 5).to(HALF), whole.relu()


@skipped("it is cast to torch.float16 and torch.float64 before a matmul")
def casts_to_two_dtypes(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    return whole.to(HALF) @ new(6, 5).to(HALF), whole.double().t()


@skipped("it is cast to torch.float64 before a matmul, and cast first, it would move more bytes")
def a_cast_to_more_bytes(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name).double() @ new(6, 5).double()


@skipped("copy_.default writes into a tensor that the fused op would use")
def the_shard_is_overwritten_before_the_cast(world: int, name: str, new: New) -> Any:
    shard = new(4, 6)
    whole = gather(shard, world, name)
    shard.copy_(new(4, 6))
    return whole.to(HALF) @ new(6, 5).to(HALF)


@skipped("it is cast to torch.float16 before a matmul, and is viewed as another dtype")
def viewed_as_integers_before_the_cast(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    integers = torch.int32 if whole.itemsize == 4 else torch.int16
    return whole.view(integers).view(whole.dtype).to(HALF) @ new(6, 5).to(HALF)


@skipped("no matmul uses the gathered tensor", candidate=False)
def a_cast_that_also_makes_contiguous(world: int, name: str, new: New) -> Any:
    turned = gather(new(4, 6), world, name).t()
    return turned.to(HALF, memory_format=torch.contiguous_format) @ new(4 * world, 5).to(HALF)


@skipped("no matmul uses the gathered tensor", candidate=False)
def a_cast_that_is_not_multiplied(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name).to(HALF).relu()


def wide(product: Tensor) -> Tensor:
    return product.double()


@skipped("a product is cast to torch.float64 before it is reduced, and the op returns sums of torch.")
def a_product_is_cast_before_it_is_scattered(world: int, name: str, new: New) -> Any:
    both = new(4 * world, 6) @ new(6, 5) + new(4 * world, 2) @ new(2, 5)
    return scatter(wide(both).view(2, 2 * world, 5).transpose(0, 1).reshape(2 * world, 10), world, name)


@skipped("a product is cast to torch.float64 before it is reduced")
def a_product_is_cast_before_it_is_added_up(world: int, name: str, new: New) -> Any:
    return reduce(wide((new(6, 4) @ new(4, 5)).view(2, 3, 5)), name)


@skipped("a product is multiplied or divided by something before it is reduced", candidate=False)
def a_product_is_scaled_and_cast_before_it_is_added_up(world: int, name: str, new: New) -> Any:
    return reduce(wide((new(6, 4) @ new(4, 5)) * 0.5), name)


@skipped("a product is multiplied or divided by something before it is reduced", candidate=False)
def a_product_is_scaled_before_it_is_added_up(world: int, name: str, new: New) -> Any:
    return reduce((new(6, 4) @ new(4, 5)) * new(5), name)


@skipped("a product is multiplied or divided by something before it is reduced", candidate=False)
def a_product_is_divided_before_it_is_scattered(world: int, name: str, new: New) -> Any:
    return scatter((new(4 * world, 4) @ new(4, 5)) / 2, world, name)


@fused(1)
def a_cast_product_beside_a_plain_one(world: int, name: str, new: New) -> Any:
    """One of the two is computed before the op, which adds it to the other one."""
    cast = (new(4 * world, 4).half() @ new(4, 5).half()).to(torch.float32)
    plain = new(4 * world, 6) @ new(6, 5)
    return scatter(cast.to(plain.dtype) + plain, world, name)


def half_product(rows: int, columns: int, new: New, inner: int = 4) -> Tensor:
    return new(rows, inner).to(torch.bfloat16) @ new(inner, columns).to(torch.bfloat16)


@fused(1)
def a_product_in_half_precision_is_cast_before_it_is_scattered(world: int, name: str, new: New) -> Any:
    return scatter(half_product(4 * world, 5, new).float(), world, name)


def half_product_with_a_bias(rows: int, new: New, *bias: int) -> Tensor:
    return torch.addmm(*(each.to(torch.bfloat16) for each in (new(*bias), new(rows, 4), new(4, 5))))


@fused(1)
def a_product_with_a_bias_is_cast_before_it_is_scattered(world: int, name: str, new: New) -> Any:
    return scatter(half_product_with_a_bias(4 * world, new, 5).float(), world, name)


@fused(1)
def it_is_rearranged_before_and_after_the_cast(world: int, name: str, new: New) -> Any:
    """This is what DTensor and autocast make of the gradient of a layer's input."""
    wide = half_product(2 * 2 * world, 5, new).view(2, 2 * world, 5).float()
    return scatter(torch.cat(wide.chunk(world, 1)), world, name)


@fused(2)
def a_sum_in_half_precision_is_cast(world: int, name: str, new: New) -> Any:
    return scatter((half_product(4 * world, 5, new) + half_product(4 * world, 5, new, 3)).float(), world, name, "avg")


@fused(1)
def a_sum_in_half_precision_with_something_else_is_cast(world: int, name: str, new: New) -> Any:
    both = half_product(4 * world, 5, new) + new(4 * world, 5).to(torch.bfloat16).relu()
    return scatter(both.float(), world, name)


@fused(3)
def products_are_cast_and_then_added(world: int, name: str, new: New) -> Any:
    """This is what autocast makes of the gradients of three layers with one input, each with a cast of its own."""
    rows = 2 * 2 * world
    products = [half_product(rows, 5, new, inner).view(2, 2 * world, 5).float() for inner in (4, 3, 2)]
    return scatter(torch.cat((products[0] + products[1] + products[2]).split(2, 1)), world, name)


@fused(1)
def only_one_of_two_products_is_used_just_once(world: int, name: str, new: New) -> Any:
    other = half_product(4 * world, 5, new)
    return scatter(half_product(4 * world, 5, new).float() + other.float(), world, name), other


@fused(1)
def a_view_of_one_of_two_products_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    other = half_product(4 * world, 5, new).view(2, 2 * world, 5)
    return scatter(half_product(4 * world, 5, new).float() + other.view(4 * world, 5).float(), world, name), other


@fused(2)
def products_with_biases_are_cast_before_they_are_added(world: int, name: str, new: New) -> Any:
    """The op rounds a product with a bias for each column. Any other product with a bias is computed before the op."""
    of_columns, of_rows = (half_product_with_a_bias(4 * world, new, *bias).float() for bias in ((5,), (4 * world, 1)))
    return scatter(half_product(4 * world, 5, new).float() + of_columns + of_rows, world, name)


@fused(1)
def products_of_two_halves(world: int, name: str, new: New) -> Any:
    """The op has one dtype for all of its factors."""
    other = new(4 * world, 6).half() @ new(6, 5).half()
    return scatter(half_product(4 * world, 5, new).float() + other.float(), world, name)


@fused(1)
def a_sum_is_cast_before_it_is_added_to_a_cast_product(world: int, name: str, new: New) -> Any:
    """The sum was rounded to half precision, so it is computed before the op."""
    both = half_product(4 * world, 5, new) + half_product(4 * world, 5, new)
    return scatter(both.float() + half_product(4 * world, 5, new).float(), world, name)


@fused(1)
def cast_products_and_other_float32_tensors(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 5).float().relu() + half_product(4 * world, 5, new).float(), world, name)


@fused(1)
def a_product_that_is_cast_for_blocks_of_columns(world: int, name: str, new: New) -> Any:
    return scatter(torch.cat(half_product(3, 2 * world, new).float().chunk(world, 1)), world, name)


@fused(1)
def a_cast_product_that_all_ranks_get(world: int, name: str, new: New) -> Any:
    return reduce(half_product(4 * world, 5, new).float(), name)


@fused(1)
def a_sum_of_cast_and_other_products_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    """The op returns the sum, and does not cast what it adds."""
    total = half_product(4 * world, 5, new, 8).float() + new(4 * world, 3).float() @ new(3, 5).float()
    return scatter(total, world, name), total


@skipped("products are cast before they are added, and the sum is used elsewhere too")
def a_sum_of_cast_products_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    total = half_product(4 * world, 5, new).float() + half_product(4 * world, 5, new).float()
    return scatter(total, world, name), total


@fused(1)
def a_cast_product_whose_rows_are_in_another_order(world: int, name: str, new: New) -> Any:
    """It is computed before the op, although it takes longer than the other one."""
    turned = half_product(4 * world, 5, new, 8).view(2, 2 * world, 5).transpose(0, 1).reshape(4 * world, 5)
    return scatter(turned.float() + new(4 * world, 3).float() @ new(3, 5).float(), world, name)


@fused(2)
def the_longer_products_of_a_sum_are_fused(world: int, name: str, new: New) -> Any:
    long = [new(4 * world, 6).float() @ new(6, 5).float() for _ in range(2)]
    return scatter(half_product(4 * world, 5, new, 2).float() + long[0] + long[1], world, name)


@fused(1)
def a_batch_of_matmuls_beside_a_matrix(world: int, name: str, new: New) -> Any:
    product = torch.bmm(new(2, 2 * world, 3), new(3, 5).expand(2, 3, 5)).view(4 * world, 5)
    return scatter(product + new(4 * world, 5).relu(), world, name)


@fused(2)
def a_batch_of_matmuls_beside_a_matmul_with_a_bias(world: int, name: str, new: New) -> Any:
    product = torch.bmm(new(2, 2 * world, 3), new(3, 5).expand(2, 3, 5)).view(4 * world, 5)
    return scatter(product + torch.addmm(new(5), new(4 * world, 4), new(4, 5)), world, name)


@fused(1)
def an_int8_weight_without_a_scale(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6).to(torch.bfloat16), world, name) @ new(5, 6).to(torch.int8).t().to(torch.bfloat16), new(2)


@fused(1)
def an_int8_weight_in_float32(world: int, name: str, new: New) -> Any:
    return (gather(new(4, 6).float(), world, name) @ new(5, 6).to(torch.int8).t().float()) * new(5).float()
