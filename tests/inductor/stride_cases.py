"""Small programs whose results have strides that the pass must keep. See `tests.inductor.cases`."""

from __future__ import annotations

from typing import Any

import torch

from tests.inductor.cases import New, fused, gather, reduce


@fused(1)
def the_gathered_tensor_is_read_by_its_strides(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 3, 4), world, name).split(2), 1)
    turned = whole.permute(1, 0, 2)
    return whole.reshape(-1, 4) @ new(4, 5), turned.as_strided((3, 4), (4, 1))


@fused(2)
def two_sums_are_added_to_a_transposed_tensor(world: int, name: str, new: New) -> Any:
    """A sum has the strides of what it begins with."""
    one, two = (reduce(new(2 * world, n) @ new(n, 5), name) for n in (6, 3))
    return new(5, 2 * world).t() + one + two
