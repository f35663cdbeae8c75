"""The problem record: a description of a call, used to choose a path and to compare the calls of all ranks.

Ops, `explain` and benchmarks create it with `problem`. Equal calls share one record, which is looked up by identity:
comparing shapes in every call would cost more than looking up what was decided for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..plan.layout import ALIGNMENT


@dataclass(frozen=True)
class OpKind:
    """The kind of an op.

    Attributes:
        gathers: whether the inputs travel, rather than partial results.
        multiplies: whether there is a matmul behind which chunks can travel.
        replicates: whether every rank gets the whole sum, rather than its part of it.
        moves_weight: whether a weight or its gradient travels. The number of rows in the matmul is then that of this
            rank's activations. It may differ between ranks and does not influence the choice of a path.
        scaled: whether the factors are 8-bit floats, whatever the dtype of the result.
        fused: whether one kernel can do the whole op, unless the last dimension is gathered or scattered.
    """

    gathers: bool = False
    multiplies: bool = False
    replicates: bool = False
    moves_weight: bool = False
    scaled: bool = False
    fused: bool = False


OPS: dict[str, OpKind] = {}
"""The ops, by name. Each op's file adds its own."""

Arguments = tuple[Any, ...]
"""Arguments of a call, for messages: shapes, and pairs (name, value)."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One op on one group, as every rank sees it.

    Attributes:
        op: one of `OPS`.
        m, n, k: for an op with a matmul, the whole matmul of one rank, (m, k) @ (k, n): m counts gathered rows, n is
            the sum over weights. For an op without a matmul, or with any number of rows, the whole tensor (gathered, or
            to be summed) is (m, n), and k is 0.
        rows: number of rows of the part that belongs to one rank.
        nbytes: bytes of the part that belongs to one rank, of the tensor that travels.
        dtype: dtype of what travels.
        factors: dtype of the factors of the matmul.
        world: number of ranks in the group.
        device: the kind of device.
        arguments: those that must be the same on all ranks.
        own: those that may differ. The path depends on them, and ranks that choose different paths get an error.
        fusible: whether there is one kernel for this call.
    """

    op: str
    m: int
    n: int
    k: int
    rows: int
    nbytes: int
    dtype: torch.dtype
    factors: torch.dtype
    world: int
    device: str
    arguments: Arguments
    own: Arguments
    fusible: bool

    @property
    def op_kind(self) -> OpKind:
        """The kind of the op."""
        return OPS[self.op]

    @property
    def spannable(self) -> bool:
        """Whether one matmul may cover the parts of several ranks, because they are next to each other in memory.

        In the workspace of a sum they are only if their size needs no padding (`symm_overlap.plan.layout`).
        """
        return self.fusible and not self.last and self.nbytes % ALIGNMENT == 0

    @property
    def share(self) -> int:
        """Bytes of a rank's part of a call without chunks. An all-reduce then shares out elements instead of rows."""
        if not self.op_kind.replicates:
            return self.nbytes
        return -(-self.m * self.n // self.world) * self.dtype.itemsize

    @property
    def last(self) -> bool:
        """Whether the last dimension is gathered or scattered, so that every rank's part has all m rows."""
        return self.rows == self.m and self.world > 1

    @property
    def common(self) -> str:
        """What must be the same on all ranks, as text."""
        return self._with(self.arguments)

    def __str__(self) -> str:
        shapes = [each for each in self.arguments if not _named(each)]
        return self._with((*shapes, *self.own, *filter(_named, self.arguments)))

    def _with(self, arguments: Arguments) -> str:
        words = [f"{each[0]}={each[1]}" if _named(each) else str(tuple(each)) for each in arguments]
        return f"{self.op}({', '.join(words)}) of {self.dtype}"


def _named(argument: Sequence[Any]) -> bool:
    """True for a pair (name, value), and not for a shape."""
    return len(argument) > 0 and isinstance(argument[0], str)


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
    factors: torch.dtype | None = None,
    last_dim: bool = False,
    one_matmul: bool = True,
    arguments: Arguments = (),
    own: Arguments = (),
) -> Problem:
    """Return the record of a call; see `Problem`.

    Args:
        factors: the dtype of the factors, if it is not ``dtype``. Those of a scaled matmul are 8-bit floats.
        last_dim: whether the last dimension is gathered or scattered, so that every rank's part has all m rows.
        one_matmul: whether the product of one matmul is the only summand, and nothing else is kept.
    """
    rows = m if last_dim else -(-m // world)  # an all-reduce shares out rows that need not divide
    op_kind = OPS[op]
    # Columns of the tensor that travels. If the last dimension is cut, the ranks share these columns.
    width = k if op_kind.gathers and op_kind.multiplies and not op_kind.moves_weight else n
    if last_dim:
        width = -(-width // world)
    fusible = op_kind.fused and one_matmul and not last_dim and m > 0
    nbytes, factors = rows * width * dtype.itemsize, torch.float8_e4m3fn if op_kind.scaled else factors or dtype
    return Problem(op, m, n, k, rows, nbytes, dtype, factors, world, device, arguments, own, fusible)
