"""Ask which path a call would take, without making it."""

from __future__ import annotations

import torch

from .._torch import resolve_group
from ..runtime import TRAITS, state_of
from ..settings import current
from .arguments import Group, group_name
from .choice import Choice
from .chooser import choose, choose_in_group
from .problem import OPS, problem


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    world: int | None = None,
    group: Group | None = None,
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
        world: ranks in the group, for a group that need not exist.
        group: instead of ``world``, a group that does exist: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh,
            dimension). What it has measured counts (`autotune`), and what is known of its devices by now.
        device: "cpu" or "cuda".
        direct: whether the ranks can reach each other's memory (one host with peer access).
        last_dim: whether the gather or scatter dimension is the last one, so that every rank has all m rows.

    Raises:
        ValueError, TypeError: an argument is none of these, or so many ranks cannot sum on CUDA.
    """
    state = None if group is None else state_of(resolve_group(group_name(group)))
    if (world is None) == (state is None):
        raise ValueError("explain: give either world or group")
    world = state.world if world is None else world  # type: ignore[union-attr]
    if op not in OPS:
        raise ValueError(f"explain({op!r}): allowed are {', '.join(sorted(OPS))}")
    if world < 1 or min(m, n, k) < 0 or device not in TRAITS:
        raise ValueError(
            f"explain: m={m}, n={n}, k={k}, world={world}, device={device!r}: sizes from 0, world from 1, "
            f"device {' or '.join(TRAITS)}"
        )
    described = problem(op, m, n, k, dtype, world, device, last_dim=last_dim)
    if state is None:
        return choose(described, current(), direct=direct)
    direct = direct and state.direct.get(device, True)
    return choose_in_group(state, described, current(), direct=direct)
