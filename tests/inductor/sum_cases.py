"""Small programs that add the results of several reductions. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, c10d, fused, reduce, scatter, skipped


@fused(3)
def three_sums_are_added(world: int, name: str, new: New) -> Any:
    """As in the backward pass of q, k and v, if each reduces the gradient of the common input by itself."""
    q, k, v = ((new(2 * world, n) @ new(n, 5)).view(2, world, 5) for n in (6, 3, 4))
    return reduce(q, name) + reduce(k, name) + reduce(v, name)


@fused(2)
def pythons_sum_adds_two_sums(world: int, name: str, new: New) -> Any:
    """It begins with 0, and adds that first."""
    return sum(reduce(new(2 * world, n) @ new(n, 5), name) for n in (6, 3))


@fused(3)
def pythons_sum_adds_three_products(world: int, name: str, new: New) -> Any:
    return scatter(sum(new(2 * world, n) @ new(n, 5) for n in (6, 3, 4)), world, name)  # type: ignore[arg-type]


@fused(1, 1)
def zero_is_added_to_sums_that_are_used_otherwise(world: int, name: str, new: New) -> Any:
    one, two = (reduce(new(world, n) @ new(n, 5), name) for n in (6, 3))
    return (one + 0).relu() + two, one + two


@fused(2)
def two_scattered_sums_and_other_tensors_are_added(world: int, name: str, new: New) -> Any:
    one, two = (scatter(new(2 * world, n) @ new(n, 5), world, name) for n in (6, 3))
    other = new(2, 5)
    return other + one + (new(2, 5) + two) + other


@fused(2)
def two_sums_of_casts_are_added(world: int, name: str, new: New) -> Any:
    """As in the backward pass under autocast."""
    one, two = (reduce((new(2 * world, n).half() @ new(n, 5).half()).float(), name) for n in (6, 3))
    return (one + two).relu()


@fused(1)
def a_sum_of_a_product_and_one_of_another_tensor_are_added(world: int, name: str, new: New) -> Any:
    return reduce(new(2 * world, 6) @ new(6, 5), name) + reduce(new(2 * world, 5), name)


@fused(1)
def a_view_of_a_sum_and_the_sum_of_a_product_are_added(world: int, name: str, new: New) -> Any:
    """As in a layer of experts, beside an expert that all tokens share."""
    experts = reduce(new(2 * world, 5), name).view(2, world, 5)
    return experts + reduce((new(2 * world, 6) @ new(6, 5)).view(2, world, 5), name)


@fused(2)
def views_and_copies_of_sums_are_added(world: int, name: str, new: New) -> Any:
    one = reduce((new(2 * world, 6) @ new(6, 5)).unsqueeze(0), name).squeeze(0).view(world, 2, 5)
    two = reduce(new(2 * world, 3) @ new(3, 5), name).clone().reshape(world, 2, 5)
    return new(world, 2, 5) + one + two


@fused(1, 1)
def sums_of_products_of_different_widths_are_added(world: int, name: str, new: New) -> Any:
    one = reduce(new(2 * world, 3) @ new(3, 6), name).view(4 * world, 3)
    return one + reduce(new(4 * world, 5) @ new(5, 3), name)


@fused(1, 1)
def a_transposed_column_and_a_row_are_added(world: int, name: str, new: New) -> Any:
    return reduce(new(1, 3) @ new(3, 6), name).t() + reduce(new(6, 5) @ new(5, 1), name)


@fused(1)
def a_view_of_the_sum_of_every_other_block_is_added(world: int, name: str, new: New) -> Any:
    """What is reduced has other strides than the result, and no such view."""
    blocks = reduce(new(2, 2 * world, 5)[:, :world], name).view(2 * world, 5)
    return blocks + reduce(new(2 * world, 6) @ new(6, 5), name)


@fused(1, 1)
def a_view_between_a_sum_and_what_is_added_is_used_elsewhere_too(world: int, name: str, new: New) -> Any:
    one = reduce(new(2 * world, 6) @ new(6, 5), name).unsqueeze(0)
    return one.view(2, world, 5) + reduce((new(2 * world, 3) @ new(3, 5)).view(2, world, 5), name), one.relu()


@fused(1, 1)
def a_sum_whose_chunks_are_concatenated_and_another_one_are_added(world: int, name: str, new: New) -> Any:
    one = reduce(new(2 * world, 6) @ new(6, 10), name)
    return torch.cat(one.chunk(2, 1)) + reduce(new(4 * world, 3) @ new(3, 5), name)


@fused(1, 1)
def a_sum_that_is_waited_for_twice_and_another_one_are_added(world: int, name: str, new: New) -> Any:
    one = c10d.all_reduce(new(2 * world, 6) @ new(6, 5), "sum", name)
    return c10d.wait_tensor(one) + reduce(new(2 * world, 3) @ new(3, 5), name), c10d.wait_tensor(one).relu()


@fused(1, 1)
def a_view_of_a_sum_that_is_added_is_used_elsewhere_too(world: int, name: str, new: New) -> Any:
    one = reduce(new(2 * world, 6) @ new(6, 5), name).view(2, world, 5)
    return one + reduce((new(2 * world, 3) @ new(3, 5)).view(2, world, 5), name), one.relu()


@fused(1, 1)
def a_sum_that_is_used_elsewhere_too_and_another_one_are_added(world: int, name: str, new: New) -> Any:
    one = reduce(new(2 * world, 6) @ new(6, 5), name)
    two = reduce((new(2 * world, 3) @ new(3, 5)).view(2, world, 5), name)
    return one.view(2, world, 5) + two, one.relu()


@fused(1, 1)
def views_of_scattered_sums_are_added(world: int, name: str, new: New) -> Any:
    one, two = (scatter(new(2 * world, n) @ new(n, 6), world, name).view(2, 2, 3) for n in (6, 3))
    return one + two


@fused(1, 1)
def a_sum_and_a_mean_are_added(world: int, name: str, new: New) -> Any:
    return reduce(new(world, 6) @ new(6, 5), name) + reduce(new(world, 3) @ new(3, 5), name, "avg")


@fused(1, 1)
def a_sum_that_is_added_is_used_elsewhere_too(world: int, name: str, new: New) -> Any:
    one = reduce(new(world, 6) @ new(6, 5), name)
    return one + reduce(new(world, 3) @ new(3, 5), name), one.relu()


@fused(1, 1)
def a_sum_is_added_twice(world: int, name: str, new: New) -> Any:
    one = reduce(new(world, 6) @ new(6, 5), name)
    return (one + one) + reduce(new(world, 3) @ new(3, 5), name)


@fused(2)
def sums_of_rows_that_the_ranks_cannot_share_are_added(world: int, name: str, new: New) -> Any:
    return reduce(new(1, 6) @ new(6, 5), name) + reduce(new(1, 3) @ new(3, 5), name)


@fused(1, 1)
def sums_that_are_scattered_along_different_dimensions_are_added(world: int, name: str, new: New) -> Any:
    columns = torch.cat((new(2, 6) @ new(6, 5 * world)).chunk(world, 1))
    return scatter(columns, world, name) + scatter(new(2 * world, 3) @ new(3, 5), world, name)


@fused(1, 1)
def two_sums_are_added_with_a_factor(world: int, name: str, new: New) -> Any:
    return torch.add(reduce(new(world, 6) @ new(6, 5), name), reduce(new(world, 3) @ new(3, 5), name), alpha=2)


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_sum_without_a_product(world: int, name: str, new: New) -> Any:
    return reduce(new(world, 5), name) + new(world, 5)
