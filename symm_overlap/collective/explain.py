"""Ask which path a call would take, without making it."""

from __future__ import annotations

import torch

from ..runtime import TRAITS
from ..settings import current
from .choice import Choice
from .chooser import choose
from .problem import OPS, problem


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    world: int,
    device: str = "cuda",
    direct: bool = True,
    last_dim: bool = False,
) -> Choice:
    """Which path a call would take, and why; ``print`` it. The ops ask the very same function.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "reduce_scatter",
            "all_reduce", "all_gather_scaled_matmul" (along the last dimension that is an "all_gather") or
            "scaled_matmul_reduce_scatter".
        m, n, k: of an op with a matmul, the whole matmul of one rank, (m, k) @ (k, n): m counts gathered rows, n is the
            sum over weights. Of an op without one, the tensor that is gathered or summed is (m, n).
        dtype: of the tensors; of a sum of scaled matmuls, that of the products.
        world: ranks in the group.
        device: "cpu" or "cuda".
        direct: whether the ranks can reach each other's memory (one host with peer access).
        last_dim: whether the gather or scatter dimension is the last one, so that every rank has all m rows.

    Raises:
        ValueError: an argument is none of these, or so many ranks cannot sum on CUDA.
    """
    if op not in OPS:
        raise ValueError(f"explain({op!r}): allowed are {', '.join(sorted(OPS))}")
    if world < 1 or min(m, n, k) < 0 or device not in TRAITS:
        raise ValueError(
            f"explain: m={m}, n={n}, k={k}, world={world}, device={device!r}: sizes from 0, world from 1, "
            f"device {' or '.join(TRAITS)}"
        )
    return choose(problem(op, m, n, k, dtype, world, device, last_dim=last_dim), current(), direct=direct)
