"""The problem record: what a call is, for the choice of a path and for comparing the calls of all ranks.

Ops, `explain` and benchmarks make it with `problem`. Equal calls get one and the same record, so that it can be looked
up by identity: to compare shapes on every call would cost more than to look up what was decided for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Sort:
    """What sort of op it is.

    Attributes:
        gathers: whether the inputs travel, rather than partial results.
        multiplies: whether there is a matmul behind which chunks can travel.
        replicates: whether every rank gets the whole sum, rather than its part of it.
        any_rows: whether what travels is a weight or its gradient. The matmul then has as many rows as this rank's
            activations, of which every rank may have another number: they take no part in the choice of a path.
        scaled: whether the factors are 8-bit floats, whatever the dtype of the result.
        fused: whether there is one kernel for all of it, unless the last dimension is gathered or scattered.
    """

    gathers: bool = False
    multiplies: bool = False
    replicates: bool = False
    any_rows: bool = False
    scaled: bool = False
    fused: bool = False


OPS: dict[str, Sort] = {}
"""The ops, by name. Each op's file adds its own."""

Arguments = tuple[Any, ...]
"""What must be the same on all ranks, for messages: shapes, and pairs (name, value)."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One op on one group, as every rank sees it.

    Attributes:
        op: one of `OPS`.
        m, n, k: of an op with a matmul, the whole matmul of one rank, (m, k) @ (k, n): m counts gathered rows, n is the
            sum over weights. Of an op without one, and of one with any number of rows, the whole tensor (gathered, or
            to be summed) is (m, n), and k is 0.
        rows: rows of the part that belongs to one rank.
        nbytes: bytes of the part that belongs to one rank, of what travels.
        dtype: of the tensors.
        world: ranks in the group.
        device: the kind of device.
        arguments: see `Arguments`.
        fusible: whether there is one kernel for this call.
    """

    op: str
    m: int
    n: int
    k: int
    rows: int
    nbytes: int
    dtype: torch.dtype
    world: int
    device: str
    arguments: Arguments
    fusible: bool

    @property
    def sort(self) -> Sort:
        """What sort of op it is."""
        return OPS[self.op]

    @property
    def share(self) -> int:
        """Bytes of a rank's part of a call that is not cut into chunks: an all-reduce then shares out elements."""
        if not self.sort.replicates:
            return self.nbytes
        return -(-self.m * self.n // self.world) * self.dtype.itemsize

    @property
    def last(self) -> bool:
        """Whether the last dimension is gathered or scattered, so that every rank's part has all m rows."""
        return self.rows == self.m and self.world > 1

    @property
    def factors(self) -> torch.dtype:
        """The dtype of what is multiplied."""
        return torch.float8_e4m3fn if self.sort.scaled else self.dtype

    def __str__(self) -> str:
        words = [
            f"{word[0]}={word[1]}" if word and isinstance(word[0], str) else str(tuple(word)) for word in self.arguments
        ]
        return f"{self.op}({', '.join(words)}) of {self.dtype}"


@lru_cache(maxsize=4096)
def problem(
    op: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    world: int,
    device: str,
    *,
    last_dim: bool = False,
    one_matmul: bool = True,
    arguments: Arguments = (),
) -> Problem:
    """The record of a call; see `Problem`.

    Args:
        last_dim: whether the last dimension is gathered or scattered, so that every rank's part has all m rows.
        one_matmul: whether nothing is summed but the product of one matmul, and nothing else is kept.
    """
    rows = m if last_dim else -(-m // world)  # an all-reduce shares out rows that need not divide
    sort = OPS[op]
    # Of what travels, over all ranks if it is the last dimension.
    width = k if sort.gathers and sort.multiplies and not sort.any_rows else n
    if last_dim:
        width = -(-width // world)
    fusible = sort.fused and one_matmul and not last_dim and m > 0
    return Problem(op, m, n, k, rows, rows * width * dtype.itemsize, dtype, world, device, arguments, fusible)
