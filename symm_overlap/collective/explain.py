"""Find out which path a call would take, without making the call."""

from __future__ import annotations

import torch

from .._torch import device_types_of, resolve_group
from ..runtime import TRAITS, state_of
from ..settings import current, integer
from .arguments import DTYPES, Group, group_name
from .choosing.choice import Choice
from .choosing.chooser import choose, choose_in_group
from .problem import OPS, OpKind, problem


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    world: int | None = None,
    group: Group | None = None,
    device: str | None = None,
    direct: bool = True,
    last_dim: bool = False,
) -> Choice:
    """Return which path a call would take, and why; ``print`` the result. The ops call the same function to choose.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "reduce_scatter",
            "all_reduce", "all_gather_scaled_matmul" (use "all_gather" for a gather of the last dimension) or
            "scaled_matmul_reduce_scatter".
        m, n, k: for an op with a matmul, the whole matmul of one rank, (m, k) @ (k, n): m counts gathered rows, n is
            the sum over weights. For an op without a matmul, the tensor that is gathered or summed is (m, n), and k is
            left out.
        dtype: dtype of the tensors, any for "all_gather"; for a sum of scaled matmuls, dtype of the products.
        world: number of ranks, for a group that need not exist.
        group: instead of ``world``, an existing group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh,
            dimension). Its measurements (`autotune`) are used, and what it knows about its devices so far.
        device: "cpu" or "cuda". By default that of ``group``: CUDA if it can send from GPUs, and if there is one, else
            CPU. With ``world``, CUDA.
        direct: whether the ranks can reach each other's memory (one host with peer access).
        last_dim: whether the gather or scatter dimension is the last one, so that every rank has all m rows.

    Returns:
        The path, how it is carried out, and the reason.

    Raises:
        ValueError, TypeError: an argument is invalid, ranks cannot share the gathered or scattered dimension evenly, or
            there are more ranks than can compute a sum on CUDA.
    """
    state = None if group is None else state_of(resolve_group(group_name(group)))
    if (world is None) == (state is None):
        raise ValueError("explain: pass either world or group")
    if device is None:
        device = "cuda" if group is None else device_of(group)
    world = integer("explain: world", world) if state is None else state.world
    if op not in OPS:
        raise ValueError(f"explain({op!r}): allowed are {', '.join(sorted(OPS))}")
    if k is None and OPS[op].multiplies and not OPS[op].moves_weight:
        raise ValueError(f"explain: {op} has a matmul: give k too, the size over which it sums")
    m, n, k = (integer(f"explain: {name}", value) for name, value in (("m", m), ("n", n), ("k", k or 0)))
    if world < 1 or min(m, n, k) < 0 or device not in TRAITS:
        raise ValueError(
            f"explain: m={m}, n={n}, k={k}, world={world}, device={device!r}: sizes must be at least 0, world at least "
            f"1, and device {' or '.join(TRAITS)}"
        )
    if dtype not in DTYPES and not (op == "all_gather" and isinstance(dtype, torch.dtype)):
        raise TypeError(f"explain: dtype is {dtype}: supported are {', '.join(map(str, DTYPES))}")
    _require_shareable(OPS[op], m, n, k, world, last_dim)
    described = problem(op, m, n, k, dtype, world, device, last_dim=last_dim)
    if state is None:
        return choose(described, current(), direct=direct)
    direct = direct and state.direct.get(device, True)
    return choose_in_group(state, described, current(), direct=direct)


def _require_shareable(kind: OpKind, m: int, n: int, k: int, world: int, last_dim: bool) -> None:
    """Raise ValueError if the ranks cannot share the dimension that is gathered or scattered, so that there is no such
    call. (The rows of a weight are not among the sizes.)
    """
    if kind.replicates or kind.moves_weight:
        return
    name, size = ("m", m) if not last_dim else ("k", k) if kind.gathers and kind.multiplies else ("n", n)
    if size % world:
        raise ValueError(f"explain: {name} is {size}, which {world} ranks cannot share evenly")


def device_of(group: Group) -> str:
    """Return the type of the devices of a group."""
    of = resolve_group(group_name(group))
    on_gpus = "cuda" in device_types_of(of) and (state_of(of).fake or torch.cuda.is_available())
    return "cuda" if on_gpus else "cpu"
