"""Shards of a parameter as FSDP2 creates them, with ``torch.chunk``'s sizes: the last ranks may have less, or nothing.

They are DTensors, so that optimizers, gradient clipping and checkpoints see the whole parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..._torch import resolve_group
from ...collective.arguments import Group, group_name
from ...collective.write_counts import counted
from ...custom_gradient import apply, require_no_transform


def mesh_of(group: Group, like: Tensor) -> DeviceMesh:
    """Return a group of any kind as a mesh of one dimension.

    Raises:
        ValueError: ``group`` is not a mesh, and ``like`` is a meta tensor, which does not tell the type of device.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        return group
    if isinstance(group, tuple) and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        group_name(group)  # raises if there is no such dimension
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names is not None:  # the mesh that `fully_shard` is given too
            named: DeviceMesh = mesh[dim if isinstance(dim, str) else mesh.mesh_dim_names[dim]]
            return named
        kind = mesh.device_type
    elif like.is_meta:
        raise ValueError("a layer on device 'meta' does not tell the device of its shards: pass a DeviceMesh as group")
    else:
        kind = like.device.type
    found = group if isinstance(group, ProcessGroup) else resolve_group(group_name(group))
    return DeviceMesh.from_group(found, kind)


def shard_size(size: int, world: int) -> int:
    """Return the size of a full shard of a dimension of this size."""
    return -(-size // world)


def sharded(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Return this rank's shard of its local ``whole``, as a copy. No communication."""
    size, rank = shard_size(whole.shape[dim], mesh.size()), mesh.get_local_rank()
    start, stop = (min(edge * size, whole.shape[dim]) for edge in (rank, rank + 1))
    local = whole.detach().narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    strides = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=strides)


def padded_shard(parameter: Any, dim: int) -> Tensor:
    """Return this rank's shard of a parameter, padded to the size that all ranks use.

    Raises:
        TypeError: the parameter is not a DTensor. ValueError: it is on a mesh of several dimensions.
    """
    require_no_transform()  # torch's own message, from `to_local`, would not help
    if not isinstance(parameter, DTensor):
        raise TypeError(
            "a parameter of a ShardedLinear has been replaced by one that is no DTensor: load values by "
            "load_state_dict, or make a DTensor of it by distribute_tensor"
        )
    if parameter.device_mesh.ndim != 1:
        raise ValueError(
            f"a parameter of a ShardedLinear is on {parameter.device_mesh}, which has several dimensions: apply "
            "fully_shard to other modules only, because a ShardedLinear gathers its own weight"
        )
    if parameter.placements != (Shard(dim),):
        parameter = parameter.redistribute(placements=[Shard(dim)])
    world = parameter.device_mesh.size()
    local = counted(apply(_AsParameter, parameter.to_local()), parameter)
    missing = shard_size(parameter.shape[dim], world) - local.shape[dim]
    return pad(local, dim, missing)


def pad(tensor: Tensor, dim: int, missing: int) -> Tensor:
    """Append ``missing`` zeros along dimension ``dim``. Returns ``tensor`` itself if none are missing."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor


class _AsParameter(torch.autograd.Function):
    """Identity whose gradient has the memory layout of the shard."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # An empty gradient may have stride 0. On a rank without a shard, it would then have another layout than the
        # parameter, and torch 2.11 would copy it with an all-gather that no other rank joins.
        return grad if grad.numel() else grad.new_empty(grad.shape)


class Mean(torch.autograd.Function):
    """Identity whose gradient, which is summed over the ranks later, is divided by their number."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, world: int) -> Tensor:
        ctx.world = world
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.world, None
