"""The private torch APIs of `symm_overlap.fsdp`: what FSDP2 knows of a module. Checked on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

__all__ = [
    "AllGather",
    "ReduceScatter",
    "buffers_of_reductions",
    "bytes_of",
    "gathers_in",
    "groups_of_gathers",
    "has_hooks",
    "ignore_in_ddp",
    "param_groups_of",
    "prefetch_depth",
    "reduces_in",
]

ParamGroup = Any
"""torch's ``FSDPParamGroup``: the parameters that are gathered together."""


def param_groups_of(module: FSDPModule) -> list[ParamGroup]:
    """The parameter groups of a module. Torch 2.11 has at most one."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def groups_of_gathers(params: ParamGroup) -> list[dist.ProcessGroup]:
    """The process groups in which parameters are gathered: forward, and backward where that is another one.

    None where parameters are replicated and not sharded.
    """
    if not isinstance(params.mesh_info, FSDPMeshInfo):
        return []
    meshes = params.mesh_info, params.post_forward_mesh_info
    return list(dict.fromkeys(mesh.shard_process_group for mesh in meshes if mesh is not None))


def gathers_in(params: ParamGroup) -> dist.ProcessGroup:
    """The process group of the next all-gather."""
    group: dist.ProcessGroup = params._all_gather_process_group
    return group


def reduces_in(params: ParamGroup) -> dist.ProcessGroup:
    """The process group of reduce-scatters."""
    group: dist.ProcessGroup = params._reduce_scatter_process_group
    return group


def bytes_of(params: ParamGroup) -> tuple[int, int]:
    """Bytes of the output of an all-gather, and of the input of a reduce-scatter, as far as is known before the first.

    Parameters with an extension (``fsdp_pre_all_gather``) may turn out to need more.
    """
    policy, world = params.mp_policy, params.mesh_info.shard_mesh_size
    gathered = reduced = 0
    for each in params.fsdp_params:
        numel, own = world * prod(each.padded_sharded_param_size), each.sharded_param.dtype
        dtype = policy.param_dtype if policy.param_dtype is not None and own.is_floating_point else own
        gathered += numel * dtype.itemsize
        if each.sharded_param.requires_grad:
            reduced += numel * (policy.reduce_dtype or dtype).itemsize
    return gathered, reduced


def prefetch_depth(module: FSDPModule) -> int:
    """How many modules are gathered ahead of time when this one runs, as far as a program has said so."""
    state = module._get_fsdp_state()
    return max(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch))


def buffers_of_reductions(params: ParamGroup) -> int:
    """How many inputs of reduce-scatters torch keeps at a time. Torch 2.11 keeps one."""
    return int(getattr(params, "reduce_scatter_max_input_buffers", 1))


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Let ``DistributedDataParallel(model)`` leave the parameters of these names alone, besides those it leaves now."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*ignored, *names]  # type: ignore[assignment]


def has_hooks(module: nn.Module) -> bool:
    """Whether something is registered to be called around ``module``."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
