"""Small programs that add a bias to a product before they reduce it. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear

from tests.inductor.cases import New, fused, reduce, scatter, skipped


@fused(1)
def a_row_is_added_before_the_product_is_scattered(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 4) @ new(4, 5) + new(5), world, name)


@fused(1)
def a_product_is_added_to_a_row(world: int, name: str, new: New) -> Any:
    return reduce(new(5) + new(4, 3) @ new(3, 5), name)


@fused(1)
def a_row_is_added_to_a_view(world: int, name: str, new: New) -> Any:
    return scatter((new(6 * world, 4) @ new(4, 5)).view(2 * world, 3, 5) + new(5), world, name)


@fused(1)
def a_slice_goes_through_a_linear_layer(world: int, name: str, new: New) -> Any:
    """As in the joint attention of diffusion models, where the tokens of the image and of the text are separated."""
    return reduce(linear(new(2, 7, 6)[:, :4], new(5, 6), new(5)), name)


@fused(1)
def a_transposed_tensor_goes_through_a_linear_layer(world: int, name: str, new: New) -> Any:
    return scatter(linear(new(3, 2 * world, 6).transpose(0, 1), new(5, 6), new(5)), world, name)


@fused(2)
def two_products_with_rows_are_added(world: int, name: str, new: New) -> Any:
    one, two = ((new(4 * world, n) @ new(n, 5)).view(-1, 2, 5) + new(5) for n in (6, 3))
    return scatter(one + two, world, name)


@fused(1)
def a_product_with_a_row_is_cast(world: int, name: str, new: New) -> Any:
    return scatter((new(4 * world, 4).half() @ new(4, 5).half() + new(5).half()).float(), world, name)


@fused(1)
def a_row_and_another_tensor_are_added(world: int, name: str, new: New) -> Any:
    return reduce(new(4, 5) + (new(4, 3) @ new(3, 5) + new(5)), name)


@fused(1)
def the_sum_with_a_row_is_used_otherwise_too(world: int, name: str, new: New) -> Any:
    total = new(4 * world, 3) @ new(3, 5) + new(5)
    return scatter(total, world, name), total.relu()


@fused(2)
def one_row_is_added_to_itself(world: int, name: str, new: New) -> Any:
    row = (new(1, 3) @ new(3, 4 * world)).view(4 * world)
    return reduce((row + row).view(1, 4 * world), name)


@fused(1)
def a_row_of_one_number_is_added(world: int, name: str, new: New) -> Any:
    return reduce(new(4, 3) @ new(3, 1) + new(1), name)


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_row_is_added_to_one_number(world: int, name: str, new: New) -> Any:
    return reduce((new(1, 3) @ new(3, 1)).view(()) + new(1), name)


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_number_is_added_to_one_number(world: int, name: str, new: New) -> Any:
    return reduce((new(1, 3) @ new(3, 1)).view(()).view(1, 1) + new(1).view(()), name)


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_row_is_added_to_a_product_that_is_used_otherwise_too(world: int, name: str, new: New) -> Any:
    product = new(4, 3) @ new(3, 5)
    return reduce(product + new(5), name), product.relu()


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_row_of_another_dtype_is_added(world: int, name: str, new: New) -> Any:
    return reduce(new(4, 3) @ new(3, 5) + new(5).double(), name)


@skipped("something of another shape or dtype is added to a product before it is reduced")
def twice_a_row_is_added(world: int, name: str, new: New) -> Any:
    return reduce((new(4, 3) @ new(3, 5)).add(new(5), alpha=2), name)


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_column_is_added(world: int, name: str, new: New) -> Any:
    return reduce(new(5, 3) @ new(3, 5) + new(5, 1), name)


@skipped("something of another shape or dtype is added to a product before it is reduced")
def a_row_is_added_to_one_column(world: int, name: str, new: New) -> Any:
    return reduce(new(4, 3) @ new(3, 1) + new(5), name)
