"""The private APIs of torch that this folder uses. Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

__all__ = [
    "AllGather",
    "ReduceScatter",
    "all_gather_work",
    "buffers_of_reductions",
    "device_of",
    "drop_unused_gather",
    "forget_post_optim_event",
    "forward_order",
    "forward_under_way",
    "gathers_in",
    "groups_of",
    "groups_of_gathers",
    "has_hooks",
    "has_peers",
    "has_post_optim_event",
    "ignore_in_ddp",
    "in_backward",
    "is_inner",
    "is_last_backward",
    "is_new",
    "is_outermost_now",
    "mesh_of",
    "one_communicator",
    "outermost",
    "pending_gather",
    "prefetch_depth",
    "prefetch_lists",
    "reduces_in",
    "replace",
    "reserve_gathers",
    "reshards",
    "restore_prefetch_lists",
    "sharded_modules",
    "state_of",
    "wait_for_gather",
]

ParamGroup = Any
"""torch's ``FSDPParamGroup``: the parameters that are gathered together."""


def groups_of_gathers(params: ParamGroup) -> list[dist.ProcessGroup]:
    """Return the process groups in which parameters are gathered: that of the forward, and that of the backward if it
    differs.

    The list is empty if parameters are replicated and not sharded.
    """
    if not isinstance(params.mesh_info, FSDPMeshInfo):
        return []
    meshes = params.mesh_info, params.post_forward_mesh_info
    return list(dict.fromkeys(mesh.shard_process_group for mesh in meshes if mesh is not None))


def reserve_gathers(params: ParamGroup, ahead: int) -> None:
    """Reserve memory for this many gathers ahead. Collective; does nothing unless the custom communication has any."""
    reserve = getattr(params._all_gather_comm, "reserve", None)
    if reserve is not None:
        reserve(ahead)


def has_peers(params: ParamGroup) -> bool:
    """True if the parameters are sharded over several ranks."""
    return any(group.size() > 1 for group in groups_of_gathers(params))


def gathers_in(params: ParamGroup) -> dist.ProcessGroup:
    """Return the process group of the next all-gather."""
    group: dist.ProcessGroup = params._all_gather_process_group
    return group


def reduces_in(params: ParamGroup) -> dist.ProcessGroup:
    """Return the process group of reduce-scatters."""
    group: dist.ProcessGroup = params._reduce_scatter_process_group
    return group


def one_communicator(params: ParamGroup) -> bool:
    """True if gathers and reduce-scatters run one at a time.

    They do if both use the communicator of one process group, unless the group's custom communication declares an order
    of its own (``own_order``).
    """
    comms = (params._all_gather_comm, params._reduce_scatter_comm)
    if any(hasattr(comm, "own_order") and comm.own_order() for comm in comms):
        return False
    return gathers_in(params) is reduces_in(params)


def prefetch_depth(module: FSDPModule) -> int:
    """Return how many modules are gathered ahead when this module runs, as set by the program."""
    state = module._get_fsdp_state()
    return max(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch))


def buffers_of_reductions(params: ParamGroup) -> int:
    """Return how many inputs of reduce-scatters torch keeps at a time. Torch 2.11 keeps one."""
    return int(getattr(params, "reduce_scatter_max_input_buffers", 1))


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Make ``DistributedDataParallel(model)`` also ignore the parameters with these names."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*ignored, *names]  # type: ignore[assignment]


def has_hooks(module: nn.Module) -> bool:
    """True if hooks are registered on ``module`` or on its own parameters."""
    kinds = (
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
    of_parameters = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(module, kind) for kind in kinds) or any(
        getattr(parameter, kind) for parameter in module.parameters(recurse=False) for kind in of_parameters
    )


def state_of(module: object) -> Any:
    """Return torch's state of a module after ``fully_shard``. Modules that were passed to it together share one."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, module and state of everything in a model that FSDP2 shards, including the model itself. Of
    modules that share a state, only the first is yielded."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and id(state_of(module)) not in seen:
            seen.add(id(state_of(module)))
            yield name, module, state_of(module)


def outermost(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards and that are not inside another such module."""
    if isinstance(model, FSDPModule):
        return [model]
    return [module for child in model.children() for module in outermost(child)]


def groups_of(state: Any) -> list[ParamGroup]:
    """Return a module's parameter groups. The list is empty if all its parameters belong to inner sharded modules."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch < 2.12


def replace(owner: Any, name: str, around: Callable[[Callable[..., Any]], Any]) -> Callable[[], None]:
    """Replace one attribute of one object by ``around(current value)``.

    Torch looks these names up on the object at each call, so a method can be replaced for a single object.

    Returns:
        A function that undoes the replacement, unless someone else has replaced the attribute since.
    """
    own, made = vars(owner).get(name), around(getattr(owner, name))
    setattr(owner, name, made)

    def undo() -> None:
        if vars(owner).get(name) is not made:
            return
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


def mesh_of(group: Any) -> DeviceMesh:
    """Return the mesh whose ranks share the parameters of a group."""
    mesh: DeviceMesh = group.mesh_info.mesh
    return mesh


def reshards(group: Any) -> bool:
    """True if parameters are freed after the forward. Known once the first forward has begun."""
    return bool(group._reshard_after_forward)


def pending_gather(group: Any) -> Any:
    """Return the gathered output of a group that has not been copied out yet, or None."""
    return group._all_gather_result


def all_gather_work(result: Any) -> Any:
    """Return the work handle of a gather, to wait for besides its event. None if the gather has a stream of its own."""
    work = result.all_gather_work
    return work if isinstance(work, dist.Work) else None


def wait_for_gather(result: Any) -> None:
    """Make the current stream wait for a gather, as torch does before it copies out."""
    if result.all_gather_event is not None:
        torch.accelerator.current_stream().wait_event(result.all_gather_event)
    if (work := all_gather_work(result)) is not None:
        work.wait()


def in_backward() -> bool:
    """True if autograd is running, for example while a checkpoint is recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def forward_under_way(state: Any) -> bool:
    """True if the forward of the outermost module has begun and not ended."""
    return state._state_ctx.iter_forward_root is not None


def is_outermost_now(state: Any) -> bool:
    """True if a forward of this module that begins now is outermost, even if an earlier forward of it raised."""
    return state._state_ctx.iter_forward_root in (None, state)


def is_inner(state: Any) -> bool:
    """True if the module is inside another module that FSDP2 shards. False before the first forward, when it is
    unknown."""
    return state._is_root is False


def device_of(state: Any) -> torch.device:
    """Return the device on which a module computes, wherever its parameters are now."""
    device: torch.device = state._device
    return device


def is_last_backward(state: Any) -> bool:
    """True if no other backward pass of the same step follows (``set_is_last_backward``)."""
    return bool(state._state_ctx.is_last_backward)


def drop_unused_gather(group: Any) -> None:
    """Drop the gathered output of a group that did not run, once the gather is done. Torch does so only when a backward
    ends. Without a backward, the next forward would use the old parameters."""
    result = group._all_gather_result
    if result is None:
        return
    wait_for_gather(result)
    # Torch 2.15 has moved the method.
    wait = getattr(group.comm_ctx, "wait_all_gather_streams_on_event", None) or group._wait_all_gather_streams_on_event
    wait(result.all_gather_event)
    group._all_gather_result = None


def is_new(state: Any) -> bool:
    """True if no forward has begun yet."""
    return state._is_root is None


def forward_order(state: Any) -> list[Any]:
    """Return the groups whose forwards have ended since the last backward, in order."""
    order: list[Any] = state._comm_ctx.post_forward_order
    return order


def prefetch_lists(state: Any) -> tuple[list[Any], list[Any]]:
    """Return what a module was set to gather ahead, in forward and in backward."""
    return list(state._states_to_forward_prefetch), list(state._states_to_backward_prefetch)


def restore_prefetch_lists(state: Any, lists: tuple[list[Any], list[Any]]) -> None:
    """Restore the lists that `prefetch_lists` returned."""
    state._states_to_forward_prefetch, state._states_to_backward_prefetch = lists


def has_post_optim_event(module: FSDPModule) -> Any:
    """Return the event that the next forward's gathers will wait for, or None."""
    return state_of(module)._state_ctx.post_optim_event


def forget_post_optim_event(module: FSDPModule) -> None:
    """Let the next forward's gathers wait for the current stream, as if no event had been set."""
    state_of(module)._state_ctx.post_optim_event = None
