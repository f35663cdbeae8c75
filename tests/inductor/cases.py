"""Small programs of functional collectives and matmuls, and what the pass must do with each.

Every program is a function ``(world, group name, new)``, where ``new(*shape)`` returns a new tensor. If a case has a
reason, the pass must leave the program unchanged and report this reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional
New = Callable[..., Tensor]
Program = Callable[[int, str, New], Any]


@dataclass(frozen=True)
class Case:
    """A program and what the pass must do with it.

    Attributes:
        matmuls: for each fused collective, the number of matmuls that it is fused with.
        reason: a part of the reason that the report must contain if the collective is skipped.
        candidate: whether the report must count the skipped collective as one beside a matmul.
    """

    program: Program
    matmuls: tuple[int, ...] = ()
    reason: str = ""
    candidate: bool = True


CASES: dict[str, Case] = {}


def fused(*matmuls: int) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        CASES[program.__name__] = Case(program, matmuls)
        return program

    return add


def skipped(reason: str, candidate: bool = True) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        CASES[program.__name__] = Case(program, reason=reason, candidate=candidate)
        return program

    return add


def gather(x: Tensor, world: int, name: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, world, name))


def scatter(x: Tensor, world: int, name: str, op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, world, name))


def reduce(x: Tensor, name: str, op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, name))


@fused(1)
def gather_rows(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name) @ new(6, 5)


@fused(3)
def gather_dim_1_for_three_weights(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1).reshape(-1, 6)
    return [whole @ new(6, n) for n in (5, 1, 7)]


@fused(1)
def gather_dim_1_by_slices(world: int, name: str, new: New) -> Any:
    whole = gather(new(3, 2, 4), world, name)
    return torch.cat([whole[3 * rank : 3 * rank + 3] for rank in range(world)], 1).view(-1, 4) @ new(4, 5)


@fused(1)
def gather_dim_1_of_batch_1(world: int, name: str, new: New) -> Any:
    return gather(new(1, 4, 6), world, name).view(1, 4 * world, 6).view(-1, 6) @ new(6, 5)


@fused(1)
def gather_the_middle_of_four_dimensions(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 3, 4, 5), world, name).chunk(world), 2)
    return (whole.reshape(-1, 5) @ new(5, 2)).view(2, 3, 4 * world, 2)


@fused(2)
def gather_columns(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(4, 3), world, name).split(4), 1)
    return whole @ new(3 * world, 5), whole @ new(3 * world, 2), whole.sum(0)


@fused(1)
def gather_with_bias(world: int, name: str, new: New) -> Any:
    return torch.addmm(new(5), gather(new(4, 6), world, name), new(6, 5))


@fused(1)
def gathered_is_used_otherwise_too(world: int, name: str, new: New) -> Any:
    raw = gather(new(2, 4, 6), world, name)
    whole = torch.cat(raw.split(2), 1)
    rows = whole.view(-1, 6)
    return rows @ new(6, 5), whole.relu(), raw.sum(1), rows.t() @ new(8 * world, 3), new(3, 8 * world) @ rows


@fused(1)
def gathered_for_a_transposed_shard(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 2, 6), world, name)  # (world 4, 2, 6)
    return whole.permute(1, 0, 2).reshape(-1, 6) @ new(6, 5)


@fused(1, 1)
def gather_then_scatter(world: int, name: str, new: New) -> Any:
    hidden = (gather(new(4, 6), world, name) @ new(6, 5)).relu()
    return scatter(hidden @ new(5, 6), world, name)


@fused(1)
def a_second_weight_that_depends_on_the_first_product(world: int, name: str, new: New) -> Any:
    whole = gather(new(5, 5), world, name)
    return whole @ (whole @ new(5, 5))[:5]


@fused(1)
def scatter_rows(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 6) @ new(6, 5), world, name)


@fused(1)
def scatter_the_average(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 6) @ new(6, 5), world, name, "avg")


@fused(1)
def scatter_dim_1(world: int, name: str, new: New) -> Any:
    product = (new(2 * 3 * world, 6) @ new(6, 5)).view(2, 3 * world, 5)
    return scatter(torch.cat(product.split(3, 1)), world, name)


@fused(1)
def scatter_dim_1_by_slices(world: int, name: str, new: New) -> Any:
    product = (new(2 * 3 * world, 6) @ new(6, 5)).view(2, 3 * world, 5)
    return scatter(torch.cat([product[:, 3 * rank : 3 * rank + 3] for rank in range(world)]), world, name)


@fused(1)
def scatter_dim_1_of_batch_1(world: int, name: str, new: New) -> Any:
    product = (new(3 * world, 6) @ new(6, 5)).view(1, 3 * world, 5)
    return scatter(torch.cat(product.chunk(world, 1)), world, name)


@fused(1)
def scatter_columns(world: int, name: str, new: New) -> Any:
    product = (new(6, 4) @ new(4, 2 * world)).view(2, 3, 2 * world)
    return scatter(torch.cat(product.split(2, 2)), world, name)


@fused(3)
def scatter_a_sum_of_three(world: int, name: str, new: New) -> Any:
    one, two, three = ((new(4 * world, k) @ new(k, 5)).view(2, 2 * world, 5) for k in (3, 1, 6))
    return scatter(torch.cat((one + two + three).split(2, 1)), world, name)


@fused(2)
def scatter_a_sum_with_biases_and_another_tensor(world: int, name: str, new: New) -> Any:
    one = torch.addmm(new(5), new(4 * world, 3), new(3, 5)).view(2, 2 * world, 5)
    two = torch.addmm(new(1, 5), new(4 * world, 2), new(2, 5)).view(2, 2 * world, 5)
    return scatter(torch.cat((one + new(2, 2 * world, 5) + two).split(2, 1)), world, name)


@fused(2)
def scatter_a_sum_with_an_expanded_tensor(world: int, name: str, new: New) -> Any:
    one, two = ((new(4 * world, k) @ new(k, 5)).view(2, 2 * world, 5) for k in (3, 1))
    return scatter(torch.cat((one + new(5).expand(2, 2 * world, 5) + two).split(2, 1)), world, name)


@fused(1)
def reduce_a_product(world: int, name: str, new: New) -> Any:
    return reduce((new(6, 4) @ new(4, 5)).view(2, 3, 5), name)


@fused(1)
def reduce_with_a_bias(world: int, name: str, new: New) -> Any:
    return reduce(torch.addmm(new(5), new(6, 4), new(4, 5)).view(2, 3, 5), name)


@fused(1)
def reduce_with_a_bias_for_each_row(world: int, name: str, new: New) -> Any:
    return reduce(torch.addmm(new(6, 1), new(6, 4), new(4, 5)), name)


@fused(1, 1)
def the_only_matrix_of_a_batch(world: int, name: str, new: New) -> Any:
    one, two = ((new(4 * world, 6) @ new(6, 5)).view(1, 4 * world, 5) for _ in range(2))
    return reduce(one[0], name), scatter(two[0], world, name)


@fused(3)
def reduce_a_sum_of_three(world: int, name: str, new: New) -> Any:
    one, two = ((new(4 * world, k) @ new(k, 5)).view(2, 2 * world, 5) for k in (3, 1))
    three = torch.addmm(new(5), new(4 * world, 6), new(6, 5)).view(2, 2 * world, 5)
    return reduce(one + two + new(5).expand(2, 2 * world, 5) + three, name)


@fused(1)
def waited_for_twice(world: int, name: str, new: New) -> Any:
    collective = c10d.all_gather_into_tensor(new(4, 6), world, name)
    return c10d.wait_tensor(collective) @ new(6, 5), c10d.wait_tensor(collective).relu()


@fused(1)
def a_gathered_tensor_is_saved_before_the_wait(world: int, name: str, new: New) -> Any:
    collective = c10d.all_gather_into_tensor(new(4, 6), world, name)
    return c10d.wait_tensor(collective) @ new(6, 5), collective


@fused(1, 1)
def sums_are_saved_before_the_wait(world: int, name: str, new: New) -> Any:
    part = c10d.reduce_scatter_tensor(new(4 * world, 6) @ new(6, 5), "sum", world, name)
    total = c10d.all_reduce(new(4, 6) @ new(6, 5), "sum", name)
    return c10d.wait_tensor(part).relu(), part, c10d.wait_tensor(total).relu(), total


@fused(1)
def the_gradient_of_a_weight(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name).t() @ new(4 * world, 5)


@fused(1)
def the_gradient_of_a_linear_s_weight(world: int, name: str, new: New) -> Any:
    return new(4 * world, 5).t() @ gather(new(4, 6), world, name)


@fused(3)
def gradients_of_three_weights_gathered_in_dim_1(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1).reshape(-1, 6)
    grads = [new(8 * world, n) for n in (5, 1, 7)]
    return [grads[0].t() @ whole, whole.t() @ grads[1], grads[2].t() @ whole]


@fused(1)
def the_gradient_of_a_weight_whose_rows_are_gathered(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(4, 3), world, name).split(4), 1)
    return whole.t() @ new(4, 5)


@fused(1)
def columns_are_gathered_and_contracted(world: int, name: str, new: New) -> Any:
    return torch.cat(gather(new(4, 3), world, name).split(4), 1) @ new(3 * world, 5)


@fused(1)
def gather_for_a_batch_of_one_matrix(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1)
    return torch.bmm(whole, new(6, 5).unsqueeze(0).expand(2, 6, 5))


@fused(1, 1)
def scatter_a_batch_of_one_matrix(world: int, name: str, new: New) -> Any:
    product = torch.bmm(new(2, 3 * world, 6), new(6, 5).expand(2, 6, 5))
    biased = torch.baddbmm(new(2, 1, 5), new(2, 3 * world, 6), new(6, 5).expand(2, 6, 5).view(2, 6, 5))
    return [scatter(torch.cat(each.split(3, 1)), world, name) for each in (product, biased)]


@fused(1, 1)
def reduce_a_batch_of_one_matrix(world: int, name: str, new: New) -> Any:
    weight = new(6, 5).expand(2, 6, 5)
    product, biased = torch.bmm(new(2, 3, 6), weight), torch.baddbmm(new(5), new(2, 3, 6), weight)
    return reduce(product, name), reduce(biased.view(6, 5), name)


@fused(1, 1)
def a_coalesced_gather(world: int, name: str, new: New) -> Any:
    both = c10d.all_gather_into_tensor_coalesced([new(4, 6), new(2, 3)], world, name)
    return [c10d.wait_tensor(whole) @ new(whole.shape[1], 5) for whole in both]


@fused(2, 1)
def coalesced_sums(world: int, name: str, new: New) -> Any:
    one, two = new(2 * world, 3) @ new(3, 4) + new(2 * world, 1) @ new(1, 4), new(world, 6) @ new(6, 5)
    parts = c10d.reduce_scatter_tensor_coalesced([one, two], "sum", world, name)
    return [c10d.wait_tensor(part) for part in parts]


@fused(1, 1)
def coalesced_all_reduces(world: int, name: str, new: New) -> Any:
    sums = c10d.all_reduce_coalesced([new(4, 6) @ new(6, 5), new(3, 2) @ new(2, 5)], "avg", name)
    return [c10d.wait_tensor(total) for total in reversed(sums)]
