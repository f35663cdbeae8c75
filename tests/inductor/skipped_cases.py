"""Small programs that the pass must leave unchanged, and the reason that it must report."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, c10d, gather, reduce, scatter, skipped
from tests.inductor.cast_cases import half_product


@skipped("each matrix of a batch is multiplied by another one", candidate=False)
def gather_for_a_batch_of_matrices(world: int, name: str, new: New) -> Any:
    return torch.bmm(gather(new(2, 4, 6), world, name), new(2 * world, 6, 5))


@skipped("each matrix of a batch is multiplied by another one", candidate=False)
def a_batch_of_products_is_scattered(world: int, name: str, new: New) -> Any:
    return scatter(torch.bmm(new(2 * world, 4, 6), new(2 * world, 6, 5)), world, name)


@skipped("the gathered tensor is trimmed, padded or put into another order before it is multiplied")
def chunks_in_another_order(world: int, name: str, new: New) -> Any:
    chunks = gather(new(2, 4, 6), world, name).split(2)
    return torch.cat(list(reversed(chunks)), 1).reshape(-1, 6) @ new(6, 5)


@skipped("the gathered tensor is trimmed, padded or put into another order before it is multiplied")
def a_chunk_twice(world: int, name: str, new: New) -> Any:
    chunks = gather(new(2, 4, 6), world, name).split(2)
    return torch.cat([chunks[0], *chunks[1:-1], chunks[0]], 1).reshape(-1, 6) @ new(6, 5)


@skipped("the gathered tensor is trimmed, padded or put into another order before it is multiplied")
def trimmed(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name)[: 4 * world - 1] @ new(6, 5)


@skipped("no matmul uses the gathered tensor", candidate=False)
def the_last_token_of_each_sequence(world: int, name: str, new: New) -> Any:
    return gather(new(2, 3, 6), world, name).view(world, 2, 3, 6)[:, :, -1] @ new(6, 5)


@skipped("the gathered tensor is trimmed, padded or put into another order before it is multiplied")
def slices_that_overlap(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 2, 6), world, name)
    return torch.cat([whole[3 * rank : 3 * rank + 4] for rank in range(world)], 1).reshape(-1, 6) @ new(6, 5)


@skipped("no matmul uses the gathered tensor", candidate=False)
def a_gathered_weight(world: int, name: str, new: New) -> Any:
    return new(3, 6) @ gather(new(4, 6), world, name).t()


@skipped("the gathered tensor is rearranged in a way that the pass cannot follow")
def rows_that_a_view_cuts(world: int, name: str, new: New) -> Any:
    whole = gather(new(3, 10), world, name)
    return whole.view(2, world, 15).view(-1, 15) @ new(15, 4)


@skipped("something other than the gradient of a weight also uses the gathered tensor")
def gradients_of_a_weight_and_a_bias(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name)
    return whole.t() @ new(4 * world, 5), whole.sum(0)


@skipped("a chunk of the gathered tensor is used by itself")
def a_chunk_by_itself(world: int, name: str, new: New) -> Any:
    chunks = gather(new(2, 4, 6), world, name).split(2)
    return torch.cat(chunks, 1).reshape(-1, 6) @ new(6, 5), chunks[1].relu()


@skipped("the other matrix depends on the gathered tensor too")
def both_matrices_are_gathered(world: int, name: str, new: New) -> Any:
    whole = gather(new(6, 6), world, name)
    return whole @ whole.relu()[:6]


@skipped("the products that are added have different numbers of columns")
def products_of_different_widths_are_added(world: int, name: str, new: New) -> Any:
    return reduce((new(2 * world, 3) @ new(3, 6)).view(4 * world, 3) + new(4 * world, 5) @ new(5, 3), name)


@skipped("the product is rearranged in a way that the pass cannot follow")
def a_sum_without_elements(world: int, name: str, new: New) -> Any:
    return reduce((new(0, 3) @ new(3, 6)).view(3, 0, 2) + (new(0, 5) @ new(5, 6)).view(3, 0, 2), name)


@skipped("the reduction is 'max'")
def the_largest_of_all_ranks(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 6) @ new(6, 5), world, name, "max")


@skipped("scattered along different dimensions, or in other orders")
def terms_in_different_arrangements(world: int, name: str, new: New) -> Any:
    rows = torch.cat((new(2 * world, 3) @ new(3, 4)).view(2, world, 4).split(1, 1))
    return scatter(rows.view(2 * world, 4) + new(2 * world, 3) @ new(3, 4), world, name)


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def an_embedding(world: int, name: str, new: New) -> Any:
    table = new(4 * world, 6)
    return scatter(table.index_put((torch.tensor([0, 1]),), new(2, 6), accumulate=True), world, name)


@skipped("a product is trimmed, padded or put into another order before it is reduced")
def a_part_of_a_product(world: int, name: str, new: New) -> Any:
    return reduce((new(6, 4) @ new(4, 5))[:3], name)


@skipped("a product is trimmed, padded or put into another order before it is reduced")
def rows_that_the_ranks_cannot_share_evenly(world: int, name: str, new: New) -> Any:
    parts = (new(4 * world - 1, 4) @ new(4, 5)).split(4)
    return scatter(torch.cat([*parts[:-1], torch.nn.functional.pad(parts[-1], (0, 0, 0, 1))]), world, name)


@skipped("a product is trimmed, padded or put into another order before it is reduced")
def a_padded_part_without_elements(world: int, name: str, new: New) -> Any:
    nothing = torch.nn.functional.pad(torch.zeros(0, 5), (0, 0, 0, 1))  # what DTensor sends for a rank without rows
    return scatter(torch.cat([new(2 * world - 1, 4) @ new(4, 5), nothing]), world, name)


@skipped("the gathered tensor is trimmed, padded or put into another order before it is multiplied")
def the_last_row_first(world: int, name: str, new: New) -> Any:
    return torch.ops.prims.rev.default(gather(new(4, 6), world, name), [0]) @ new(6, 5)


@skipped("not a whole product of a matmul", candidate=False)
def a_product_that_fills_half_of_what_is_reduced(world: int, name: str, new: New) -> Any:
    return scatter(torch.nn.functional.pad(new(2 * world, 4) @ new(4, 5), (0, 0, 0, 2 * world)), world, name)


@skipped("not a whole product of a matmul", candidate=False)
def a_product_behind_another_tensor(world: int, name: str, new: New) -> Any:
    return scatter(torch.cat([new(world, 5), new(2 * world, 4) @ new(4, 5)]), world, name)


@skipped("not a whole product of a matmul", candidate=False)
def a_product_of_an_op_of_this_package(world: int, name: str, new: New) -> Any:
    # The product is an element of a list that the op returns.
    return scatter(torch.ops.symm_overlap.fused_all_gather_matmul(new(4, 6), [new(6, 5)], 0, name)[1][0], world, name)


@skipped("not a whole product of a matmul", candidate=False)
def products_side_by_side(world: int, name: str, new: New) -> Any:
    return scatter(torch.cat([new(2 * world, 4) @ new(4, 5), new(2 * world, 4) @ new(4, 5)]), world, name)


@skipped("without a wait", candidate=False)
def a_collective_that_is_waited_for_elsewhere(world: int, name: str, new: New) -> Any:
    return c10d.all_gather_into_tensor(new(4, 6), world, name)


@skipped("no matmul uses the gathered tensor", candidate=False)
def put_behind_another_tensor(world: int, name: str, new: New) -> Any:
    return torch.cat([new(3, 6), gather(new(4, 6), world, name)]) @ new(6, 5)


@skipped("the product is rearranged in a way that the pass cannot follow")
def a_view_of_a_product_without_elements(world: int, name: str, new: New) -> Any:
    return reduce((new(3, 4) @ new(4, 0)).view(0, 3), name)


@skipped("the op rejects it: a tensor is torch.int64, and the ops multiply and add only floating numbers")
def a_matmul_of_integers(world: int, name: str, new: New) -> Any:
    return reduce(new(6, 4).long() @ new(4, 5).long(), name)


@skipped("a product is cast to torch.float32 before it is reduced, and the op returns sums of torch.float64")
def a_cast_to_fewer_bits(world: int, name: str, new: New) -> Any:
    return scatter((new(4 * world, 4).double() @ new(4, 5).double()).float(), world, name)


@skipped("the product of a scaled matmul is cast before it is reduced")
def a_scaled_product_that_is_cast(world: int, name: str, new: New) -> Any:
    A, B = (new(rows, 16).to(torch.float8_e4m3fn) for rows in (4 * world, 8))
    one = new(1).float() + 1
    return scatter(torch._scaled_mm(A, B.t(), one, one, out_dtype=torch.bfloat16).float(), world, name)


@skipped("a product is cast before it is reduced, and is used elsewhere too")
def a_product_that_is_cast_and_also_kept(world: int, name: str, new: New) -> Any:
    product = half_product(4 * world, 5, new)
    return scatter(product.float(), world, name), product


@skipped(
    "a product is cast before it is reduced, and it or its cast is used elsewhere too, or its bias differs between rows"
)
def the_cast_product_is_used_elsewhere(world: int, name: str, new: New) -> Any:
    wide = half_product(4 * world, 5, new).float()
    return scatter(wide, world, name), wide


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_product_whose_bytes_are_reduced_as_other_numbers(world: int, name: str, new: New) -> Any:
    product = new(4 * world, 4).double() @ new(4, 5).double()
    return scatter(product.view(torch.int64), world, name)


@skipped("something else uses a sum with a product, to which more is added before it is reduced")
def a_residual_stream_to_which_more_is_added(world: int, name: str, new: New) -> Any:
    stream = new(4 * world, 4) @ new(4, 5) + new(4 * world, 5)
    return scatter(stream + new(4 * world, 5), world, name), stream.relu()


@skipped("its result is not used", candidate=False)
def a_collective_that_nothing_uses(world: int, name: str, new: New) -> Any:
    c10d.all_gather_into_tensor(new(4, 6), world, name)
    return new(2, 3)


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_bucket_that_nothing_uses(world: int, name: str, new: New) -> Any:
    reduce(torch.cat([(new(2, 3) @ new(3, 4)).view(-1), (new(2, 3) @ new(3, 5)).view(-1)]), name)
    return new(2, 3)


@skipped("Inductor multiplies by this int8 weight itself")
def an_int8_weight_with_a_scale(world: int, name: str, new: New) -> Any:
    weight = new(5, 6).to(torch.int8)
    return (gather(new(2, 4, 6).to(torch.bfloat16), world, name).view(-1, 6) @ weight.t().to(torch.bfloat16)).view(
        -1, 4, 5
    ) * new(5).to(torch.bfloat16)


@skipped("addmm and baddbmm with other factors than 1", candidate=True)
def gathered_for_a_weighted_sum(world: int, name: str, new: New) -> Any:
    return torch.addmm(new(5), gather(new(4, 6), world, name), new(6, 5), beta=0.5)


@skipped("addmm and baddbmm with other factors than 1", candidate=True)
def a_weighted_sum_is_reduced(world: int, name: str, new: New) -> Any:
    return reduce(torch.addmm(new(5), new(4, 6), new(6, 5), alpha=0.5), name)


@skipped("have their elements in different orders")
def terms_in_different_orders(world: int, name: str, new: New) -> Any:
    return reduce((new(6, 4) @ new(4, 6)).t() + new(6, 4) @ new(4, 6), name)


@skipped("a rank's part is not a block of rows or of columns")
def the_rank_s_part_is_every_other_column(world: int, name: str, new: New) -> Any:
    product = new(3, 4) @ new(4, 2 * world)
    return scatter(product.view(3, 2, world).permute(2, 0, 1).contiguous(), world, name)


@skipped("scattered along different dimensions, or in other orders")
def another_tensor_in_the_order_of_the_collective(world: int, name: str, new: New) -> Any:
    product = (new(3 * 2 * world, 4) @ new(4, 6)).view(3, 2 * world, 6)
    return scatter(product.transpose(0, 1) + new(2 * world, 3, 6), world, name)
