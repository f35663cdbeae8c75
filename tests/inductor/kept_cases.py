"""Small programs in which another op also uses a product. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, fused, reduce, scatter, skipped
from tests.inductor.scaled_cases import scaled


@fused(1)
def the_product_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = new(4 * world, 6) @ new(6, 5)
    return scatter(product, world, name, "avg"), product.relu()


@fused(1)
def the_product_with_its_bias_is_saved(world: int, name: str, new: New) -> Any:
    product = torch.addmm(new(5), new(2 * 3 * world, 6), new(6, 5))
    return scatter(torch.cat(product.view(2, 3 * world, 5).split(3, 1)), world, name), product


@fused(1)
def a_slice_of_the_product_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    slices = (new(3 * world, 6) @ new(6, 5)).split(3)
    return scatter(torch.cat(slices), world, name), slices[0].relu()


@fused(1)
def views_of_the_product_are_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = (new(2 * 3 * world, 6) @ new(6, 5)).view(2, 3 * world, 5)
    chunks = torch.cat(product.split(3, 1))
    return scatter(chunks, world, name), product.sum(1), chunks.relu()


@fused(1)
def columns_of_a_product_that_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = (new(6, 4) @ new(4, 2 * world)).view(2, 3, 2 * world)
    return scatter(torch.cat(product.split(2, 2)), world, name), product.relu()


@fused(1, 1)
def batches_of_one_matrix_are_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = torch.bmm(new(2, 3 * world, 6), new(6, 5).expand(2, 6, 5))
    biased = torch.baddbmm(new(2, 1, 5), new(2, 3 * world, 6), new(6, 5).expand(2, 6, 5).view(2, 6, 5))
    return [(scatter(torch.cat(each.split(3, 1)), world, name), each.relu()) for each in (product, biased)]


@fused(2)
def scatter_a_sum_of_a_product_and_one_that_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    kept = new(3 * world, 6) @ new(6, 5)
    return scatter(kept + new(3 * world, 2) @ new(2, 5), world, name), kept.relu()


@fused(3)
def scatter_a_sum_of_three_of_which_two_are_used_elsewhere(world: int, name: str, new: New) -> Any:
    one, three = (new(4 * world, k) @ new(k, 5) for k in (3, 6))
    two = torch.addmm(new(5), new(4 * world, 2), new(2, 5))
    views = [each.view(2, 2 * world, 5) for each in (one, two, three)]
    total = views[0] + views[1] + new(2, 2 * world, 5) + views[2]
    return two.relu(), scatter(torch.cat(total.split(2, 1)), world, name), views[2].sum(0)


@fused(2)
def the_sum_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    total = new(3 * world, 6) @ new(6, 5) + new(3 * world, 2) @ new(2, 5)
    return scatter(total, world, name), total.relu()


@fused(1)
def a_product_and_its_sum_with_another_tensor_are_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = (new(6 * world, 4) @ new(4, 5)).view(2, 3 * world, 5)
    total = product + new(2, 3 * world, 5)
    return product.relu(), total.sum(0), scatter(torch.cat(total.split(3, 1)), world, name)


@fused(2)
def a_product_that_is_added_twice_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = new(3 * world, 6) @ new(6, 5)
    return scatter(product + product, world, name), product.relu()


@fused(1)
def a_product_that_another_one_depends_on(world: int, name: str, new: New) -> Any:
    kept = new(3 * world, 6) @ new(6, 5)
    return scatter(kept + kept.relu() @ new(5, 5), world, name)


@fused(1)
def a_product_that_is_added_in_another_arrangement(world: int, name: str, new: New) -> Any:
    turned = (new(5, 6) @ new(6, 3 * world)).t()
    return scatter(new(3 * world, 2) @ new(2, 5) + turned, world, name), turned.relu()


@skipped("the product is used elsewhere too, also by a tensor that it is added to")
def a_product_that_what_it_is_added_to_depends_on(world: int, name: str, new: New) -> Any:
    product = new(4 * world, 6) @ new(6, 5)
    return scatter(product + product.relu(), world, name)


@skipped("the sum is used elsewhere too, in another arrangement than its terms")
def a_sum_of_transposed_products_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    one, two = ((new(3 * world, k) @ new(k, 5)).t() for k in (2, 6))
    total = one + two
    return scatter(total.t().contiguous(), world, name), total.relu()


@fused(1)
def a_scaled_product_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = scaled(new, 16 * world, 16, 16)
    return scatter(product, world, name), product.relu()


@fused(1)
def a_scaled_product_is_saved_that_dim_1_of_is_scattered(world: int, name: str, new: New) -> Any:
    product = scaled(new, 2 * 3 * world, 16, 8).view(2, 3 * world, 8)
    return scatter(torch.cat(product.split(3, 1)), world, name, "avg"), product


@fused(1)
def columns_of_a_scaled_product_that_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = scaled(new, 6, 16, 16 * world)
    return product.sum(0), scatter(torch.cat(product.split(16, 1)), world, name)


@fused(3)
def a_sum_of_scaled_products_and_one_of_them_are_used_elsewhere(world: int, name: str, new: New) -> Any:
    bias = new(4).float()
    q, k, v = (scaled(new, 4 * world, 16, 4, bias=each) for each in (None, bias, None))
    total = q + k + v
    return scatter(total, world, name), k.relu(), total.sum(0)


@fused(2)
def a_scaled_product_of_a_sum_is_used_elsewhere_and_the_sum_is_reduced(world: int, name: str, new: New) -> Any:
    kept = scaled(new, 3 * world, 16, 4)
    return reduce(kept + scaled(new, 3 * world, 32, 4), name), kept.relu()


@fused(1)
def a_product_and_a_scaled_one_that_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    kept = scaled(new, 4 * world, 16, 4)
    return scatter(kept + new(4 * world, 3).float() @ new(3, 4).float(), world, name), kept.relu()


@skipped("the product is used elsewhere too, also by a tensor that it is added to")
def a_scaled_product_and_what_is_computed_from_it(world: int, name: str, new: New) -> Any:
    product = scaled(new, 4 * world, 16, 4)
    return scatter(product + product.relu(), world, name)


@fused(1)
def a_product_that_is_used_elsewhere_is_reduced(world: int, name: str, new: New) -> Any:
    product = (new(6 * world, 4) @ new(4, 5)).view(2 * world, 3, 5)
    return product.sum(1), reduce(product, name), product.relu()


@fused(1)
def a_product_of_an_odd_batch_is_reduced_and_saved(world: int, name: str, new: New) -> Any:
    product = (new(3 * 2 * world, 4) @ new(4, 5)).view(3, 2 * world, 5)
    return reduce(product, name), product


@fused(1)
def a_product_with_its_bias_is_reduced_and_saved(world: int, name: str, new: New) -> Any:
    product = torch.addmm(new(5), new(2 * world, 4), new(4, 5))
    return reduce(product.view(1, 2 * world, 5), name, "avg"), product


@fused(1)
def a_scaled_product_that_is_used_elsewhere_is_reduced(world: int, name: str, new: New) -> Any:
    product = scaled(new, 2 * world, 16, 4)
    return reduce(product, name), product.relu()


@fused(2)
def a_sum_of_which_one_product_is_used_elsewhere_is_reduced(world: int, name: str, new: New) -> Any:
    kept = new(3 * world, 6) @ new(6, 5)
    return reduce(kept + new(3 * world, 2) @ new(2, 5), name), kept.relu()


@skipped("can be fused only if the ranks can share the rows evenly")
def a_product_whose_rows_do_not_divide_is_reduced_and_used_elsewhere(world: int, name: str, new: New) -> Any:
    product = new(world + 1, 4) @ new(4, 5)
    return reduce(product, name), product.relu()


@skipped("the product is used elsewhere too, also by a tensor that it is added to")
def what_is_computed_from_a_product_is_reduced_with_it(world: int, name: str, new: New) -> Any:
    product = new(4 * world, 6) @ new(6, 5)
    return reduce(product + product.relu(), name), product.sum(0)
