"""Programs for the tests of the pass: matmuls of a batch of one, by hand and by ``torch.einsum``."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, fused, gather, reduce, scatter


@fused(1)
def gather_for_an_einsum(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1)
    return torch.einsum("bsk,kn->bsn", whole, new(6, 5))


@fused(3)
def gather_for_the_heads_of_an_einsum(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1)
    return [torch.einsum("bsk,knd->bsnd", whole, new(6, heads, 3)) for heads in (4, 2, 2)]


@fused(1)
def scatter_the_heads_of_an_einsum(world: int, name: str, new: New) -> Any:
    product = torch.einsum("bsnd,ndk->bsk", new(2, 4 * world, 3, 2), new(3, 2, 5))
    return scatter(torch.cat(product.split(4, 1)), world, name)


@fused(1)
def scatter_an_einsum_by_a_transposed_weight(world: int, name: str, new: New) -> Any:
    return scatter(torch.einsum("sn,kn->sk", new(4 * world, 6), new(5, 6)), world, name)


@fused(1)
def reduce_an_einsum(world: int, name: str, new: New) -> Any:
    return reduce(torch.einsum("...k,kn->...n", new(2, 3, 6), new(6, 5)), name)


@fused(1)
def the_gradient_of_a_weight_by_an_einsum(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1)
    return torch.einsum("bsk,bsn->kn", whole, new(2, 4 * world, 5))


@fused(1, 1)
def a_batch_of_one(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 6), world, name).view(1, 4 * world, 6)
    return torch.bmm(whole, new(1, 6, 5)), reduce(torch.bmm(new(1, 4, 6), new(1, 6, 5)), name)


@fused(1, 1, 1)
def batches_of_one_with_biases(world: int, name: str, new: New) -> Any:
    biases = new(1, 4 * world, 5), new(1, 5), new(5)
    products = [torch.baddbmm(bias, new(1, 4 * world, 6), new(1, 6, 5)) for bias in biases]
    return [scatter(each.view(4 * world, 5), world, name) for each in products]
