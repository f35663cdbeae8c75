"""Small programs with buckets: one collective for several tensors. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, fused, gather, reduce, scatter, skipped


@fused(1, 2)
def a_bucket_of_two_gathers(world: int, name: str, new: New) -> Any:
    one, two = new(4, 6), new(2, 3)
    bucket = gather(torch.cat([one.flatten(), two.flatten()]), world, name).view(world, -1)
    first, second = bucket.split_with_sizes([24, 6], 1)
    rows = second.reshape(2 * world, 3)
    return first.reshape(4 * world, 6) @ new(6, 5), rows @ new(3, 4), rows @ new(3, 1)


@fused(1, 1)
def a_bucket_of_two_gathers_by_slices(world: int, name: str, new: New) -> Any:
    bucket = gather(torch.cat([new(4, 6).view(-1), new(2, 3).view(-1)]), world, name).view(world, 30)
    return bucket[:, 24:].reshape(-1, 3) @ new(3, 4), bucket[:, :24].reshape(-1, 6) @ new(6, 5)


@fused(1, 2)
def a_bucket_of_two_sums(world: int, name: str, new: New) -> Any:
    one, two = new(2 * world, 3) @ new(3, 4), new(world, 6) @ new(6, 5) + new(world, 1) @ new(1, 5)
    bucket = torch.cat([one.view(world, -1), two.view(world, -1)], 1).view(-1)
    first, second = scatter(bucket, world, name).split_with_sizes([8, 5])
    return second.view(1, 5), first.view(2, 4)


@fused(1, 1)
def a_bucket_of_two_all_reduces(world: int, name: str, new: New) -> Any:
    one, two = new(4, 6) @ new(6, 5), new(3, 2) @ new(2, 5)
    bucket = reduce(torch.cat([one.view(-1), two.view(-1)]), name)
    return bucket[:20].view(4, 5), bucket[20:].view(3, 5).relu()


@skipped("no matmul uses the gathered tensor", candidate=False)
def a_bucket_in_which_one_tensor_is_not_multiplied(world: int, name: str, new: New) -> Any:
    bucket = gather(torch.cat([new(4, 6).view(-1), new(2, 3).view(-1)]), world, name).view(world, 30)
    return bucket[:, :24].reshape(-1, 6) @ new(6, 5), bucket[:, 24:]


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_bucket_of_two_all_reduces_of_two_dtypes(world: int, name: str, new: New) -> Any:
    one, two = new(4, 6).half() @ new(6, 5).half(), new(3, 2) @ new(2, 5)
    bucket = reduce(torch.cat([one.view(-1), two.view(-1)]), name)
    return bucket[:20].view(4, 5), bucket[20:].view(3, 5)


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_bucket_of_two_sums_of_two_dtypes(world: int, name: str, new: New) -> Any:
    one, two = new(2 * world, 3) @ new(3, 4), new(world, 6).half() @ new(6, 5).half()
    bucket = torch.cat([one.view(world, -1), two.view(world, -1)], 1).view(-1)
    first, second = scatter(bucket, world, name).split_with_sizes([8, 5])
    return second.view(1, 5), first.view(2, 4)


@skipped("no matmul uses the gathered tensor", candidate=False)
def a_bucket_of_two_gathers_of_two_dtypes(world: int, name: str, new: New) -> Any:
    one, two = new(4, 6).half(), new(2, 3)
    bucket = gather(torch.cat([one.flatten(), two.flatten()]), world, name).view(world, -1)
    first, second = bucket.split_with_sizes([24, 6], 1)
    return first.reshape(4 * world, 6) @ new(6, 5).float(), second.reshape(2 * world, 3) @ new(3, 4).float()


@skipped("no matmul uses the gathered tensor", candidate=False)
def a_bucket_that_is_cut_elsewhere(world: int, name: str, new: New) -> Any:
    bucket = gather(torch.cat([new(4, 6).view(-1), new(2, 3).view(-1)]), world, name).view(world, 30)
    first, second = bucket.split_with_sizes([12, 18], 1)
    return first.reshape(-1, 6) @ new(6, 5), second.reshape(-1, 3) @ new(3, 4)


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_bucket_of_sums_in_the_order_of_all_reduces(world: int, name: str, new: New) -> Any:
    one, two = new(2 * world, 3) @ new(3, 4), new(world, 6) @ new(6, 4)
    whole = scatter(torch.cat([one.view(-1), two.view(-1)]), world, name)
    return whole.split_with_sizes([8, 4])


@skipped("what is reduced is not a whole product of a matmul, nor a sum with one", candidate=False)
def a_bucket_of_sums_one_below_the_other(world: int, name: str, new: New) -> Any:
    parts = [(new(2, 3) @ new(3, 4)).view(1, -1) for _ in range(world)]
    return scatter(torch.cat(parts).view(-1), world, name)[0:8]
