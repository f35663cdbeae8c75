"""Small programs that write into a tensor which a fused op would use. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, fused, gather, reduce, scatter, skipped


@fused(1)
def the_weight_is_overwritten_at_the_end(world: int, name: str, new: New) -> Any:
    weight = new(6, 5)
    product = scatter(new(4 * world, 6) @ weight, world, name)
    return product.relu(), weight.copy_(new(6, 5))


@fused(1)
def the_shard_and_the_parameter_are_overwritten_at_the_end(world: int, name: str, new: New) -> Any:
    shard, parameter = new(4, 6), new(5, 6)
    whole = gather(shard.view(2, 2, 6), world, name)
    product = whole.view(-1, 6) @ parameter.t()
    halved, less = whole[:2].view(4, 6) * 0.5, parameter - product.sum(0)[:, None]
    shard.copy_(halved)
    parameter.copy_(less)
    return product


@fused(2)
def the_factors_are_overwritten_at_the_end(world: int, name: str, new: New) -> Any:
    x, weight = new(2 * world, 6), new(6, 5)
    total = reduce(x @ weight + new(2 * world, 3) @ new(3, 5), name)
    x.copy_(total[:, :1].expand_as(x))
    weight.copy_(new(6, 5))
    return total


@skipped("copy_.default writes into a tensor that the fused op would use")
def gathered_is_overwritten(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    product = whole @ new(6, 5)
    return product, whole.copy_(new(4 * world, 6))


@skipped("copy_.default writes into a tensor that the fused op would use")
def the_weight_is_overwritten(world: int, name: str, new: New) -> Any:
    weight = new(6, 5)
    product = scatter(new(4 * world, 6) @ weight, world, name)
    return product, weight.copy_(new(6, 5)).relu()


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_factor_is_overwritten_before_a_row_is_added(world: int, name: str, new: New) -> Any:
    x = new(2 * world, 6)
    product = x @ new(6, 5)
    after = x.copy_(new(2 * world, 6))
    return reduce(product + new(5), name), after


@skipped("copy_.default writes into a tensor that the fused op would use")
def a_factor_of_a_sum_is_overwritten(world: int, name: str, new: New) -> Any:
    x = new(2 * world, 6)
    total = x @ new(6, 5) + new(2 * world, 3) @ new(3, 5)
    after = x.copy_(new(2 * world, 6))
    return reduce(total, name), after


@skipped("copy_.default writes into a tensor that the fused op would use")
def the_weight_is_a_view_of_what_is_overwritten(world: int, name: str, new: New) -> Any:
    parameter = new(5, 6)
    product = gather(new(4, 6), world, name) @ parameter.t()
    parameter.copy_(new(5, 6))
    return product, parameter.relu()


@skipped("copy_.default writes into a tensor that the fused op would use")
def a_product_is_overwritten_at_the_end(world: int, name: str, new: New) -> Any:
    product = new(4 * world, 6) @ new(6, 5)
    return scatter(product, world, name), product.copy_(new(4 * world, 5))


@skipped("add_.Tensor writes into a tensor that the fused op would use")
def a_row_of_the_gathered_tensor_is_changed(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    whole.select(0, 1).add_(1)
    return whole @ new(6, 5)


@skipped("mul_.Tensor writes into a tensor that the fused op would use")
def a_chunk_of_the_product_is_changed(world: int, name: str, new: New) -> Any:
    product = new(2 * world, 6) @ new(6, 5)
    product.split(world)[1].mul_(2)
    return reduce(product, name)


@skipped("copy_.default writes into a tensor that the fused op would use")
def the_weight_is_a_part_of_what_is_overwritten(world: int, name: str, new: New) -> Any:
    weights = new(2, 6, 5)
    product = gather(new(4, 6), world, name) @ weights[1]
    weights.copy_(new(2, 6, 5))
    return product, weights.relu()


@skipped("copy_.default writes into a tensor that the fused op would use")
def the_weight_shares_memory_with_what_is_overwritten(world: int, name: str, new: New) -> Any:
    first, second = new(2, 6, 5).unbind()
    product = scatter(new(4 * world, 6) @ first, world, name)
    second.copy_(new(6, 5))
    return product, second.relu()


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_piece_of_a_bucket_is_overwritten(world: int, name: str, new: New) -> Any:
    one, two = new(4, 6) @ new(6, 5), new(3, 2) @ new(2, 5)
    bucket = torch.cat([one.view(-1), two.view(-1)])
    two.mul_(2)
    whole = reduce(bucket, name)
    return whole[:20].view(4, 5), whole[20:].view(3, 5), two


@skipped("mul_.Tensor writes into a tensor that the fused op would use")
def what_was_copied_is_changed(world: int, name: str, new: New) -> Any:
    product = new(2 * world, 6) @ new(6, 5)
    copy = product.clone()
    product.mul_(2)
    return reduce(copy, name)
