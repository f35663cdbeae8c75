"""What the ops accept. Every check runs before any communication: a bad argument raises an error instead of a hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .._torch import compiling, resolve_group

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
REDUCE_OPS = ("sum", "avg")


_Described = TypeVar("_Described")

MOST_REMEMBERED = 4096
"""How many kinds of arguments are remembered for one op. If a program uses more, the cache is cleared."""


def remembered(describe: Callable[..., _Described]) -> Callable[..., _Described]:
    """Return ``describe``, a pure function of positional arguments, with a cache for arguments that are alike.

    Arguments are alike if their tensors have the same shapes, dtypes and devices, and if their numbers, strings, lists
    and tuples are equal. If ``describe`` raises, nothing is cached. It must not return None.
    """
    known: dict[bytes, _Described] = {}

    @wraps(describe)
    def look_up(*arguments: Any) -> _Described:
        key = _C.argument_key(arguments)
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_REMEMBERED:
                known.clear()
            found = known[key] = describe(*arguments)
        return found

    return look_up


Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, "int | str"] | str | None


def group_name(group: Group) -> str:
    """Return the name of a group. ``group`` is a ProcessGroup, its name, a one-dimensional DeviceMesh, (DeviceMesh,
    dimension), or None, which is the default group, as in torch.distributed.

    Raises:
        TypeError: ``group`` is none of these.
        ValueError: a DeviceMesh of several dimensions came without a dimension, or it has no such dimension, or this
            rank is not in it; ``group`` was destroyed; or it is the value that ``torch.distributed.new_group`` returns
            on a rank outside of the group.
    """
    if isinstance(group, str):
        return group
    if isinstance(group, dist.ProcessGroup):
        name = str(group.group_name)
        # A group that was created after this one was destroyed may have the same name.
        if not compiling() and resolve_group(name) is not group:
            raise ValueError(f"group is a process group that was destroyed; another one is named {name!r} now")
        return name
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions: pass one of them with it, (mesh, dim)")
        try:
            return str(group.get_group().group_name)
        except IndexError:
            raise _outside(group) from None
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        try:
            return str(mesh.get_group(dim).group_name)
        except (KeyError, IndexError, AssertionError, TypeError) as error:  # mesh dimensions may also be flattened ones
            if mesh.get_coordinate() is None:
                raise _outside(mesh) from None
            raise ValueError(f"the DeviceMesh {mesh} has no dimension {dim!r}: {error}") from error
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is not in the group: torch.distributed.new_group returned NON_GROUP_MEMBER here; make the call "
            "only on ranks of the group"
        )
    if group is None:
        if dist.is_initialized():
            return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        raise TypeError("group is None: before torch.distributed.init_process_group, there are no process groups")
    raise TypeError(
        f"group must be a ProcessGroup, its name, a DeviceMesh or (DeviceMesh, dim), not {type(group).__name__}"
    )


def _outside(mesh: DeviceMesh) -> ValueError:
    return ValueError(f"this rank is not in {mesh}: make the call only on ranks of the mesh")


def dimension(name: str, dim: int, shape: Sequence[int | torch.SymInt]) -> int:
    """Return ``dim`` as a number from 0 on. Raises ValueError if a tensor of this shape has no such dimension."""
    dims = len(shape)
    if not -dims <= dim < dims:
        has = f"dimensions {-dims} to {dims - 1}" if dims else "no dimensions"
        raise ValueError(f"{name} is {dim}, but the tensor of shape {tuple(shape)} has {has}")
    return dim % dims


def require_reduce_op(reduce_op: str, name: str = "reduce_op") -> None:
    """Raise ValueError if the reduce op, the argument ``name``, is not supported."""
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"{name} is {reduce_op!r}: allowed are 'sum' and 'avg'")


def require_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless ``tensor`` is a tensor: the dispatcher lets None through."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}: give a tensor")


def require_tensors(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Require tensors that all have one supported dtype and are on one device.

    Raises:
        TypeError: they do not.
    """
    (first_name, first), *rest = tensors
    for name, tensor in tensors:
        require_tensor(name, tensor)
    if first.dtype not in DTYPES:
        raise TypeError(f"{first_name} is {first.dtype}: supported are {', '.join(str(dtype) for dtype in DTYPES)}")
    for name, tensor in rest:
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and {first_name} is {first.dtype}: they must have one dtype")
    require_one_device(tensors)


def require_one_device(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise TypeError unless all tensors are on one device."""
    (first_name, first), *rest = tensors
    for name, tensor in rest:
        if tensor.device != first.device:
            raise TypeError(
                f"{name} is on {tensor.device} and {first_name} is on {first.device}: they must be on one device"
            )


def require_matmul(name: str, A: Tensor, contracted: int | torch.SymInt, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Require that ``A`` has rows to multiply, and that every weight is a matrix (contracted, any).

    Raises:
        ValueError: this does not hold.
    """
    if A.dim() < 2:
        raise ValueError(f"{name} of shape {tuple(A.shape)} must have at least 2 dimensions: (..., M, K)")
    for weight_name, weight in weights:
        if weight.dim() != 2:
            raise ValueError(f"{weight_name} of shape {tuple(weight.shape)} must be a matrix (K, N)")
        if weight.shape[0] != contracted:
            raise ValueError(
                f"{weight_name} of shape {tuple(weight.shape)} does not match {name} of shape {tuple(A.shape)}: "
                f"it needs {contracted} rows"
            )


def require_divisible(dim: int, tensor_shape: Sequence[int | torch.SymInt], world: int) -> None:
    """Raise ValueError if ``world`` ranks cannot share dimension ``dim`` evenly."""
    if tensor_shape[dim] % world != 0:
        raise ValueError(
            f"scatter_dim {dim} of the product of shape {tuple(tensor_shape)} has size {tensor_shape[dim]}, "
            f"which {world} ranks cannot share evenly: pad it, or use another dimension"
        )
