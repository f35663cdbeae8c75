"""The private APIs of torch that the runtime uses. Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.autograd.function import BackwardCFunction as PythonNode
from torch.distributed._composable.replicate import DDP as ReplicatedByDdp  # noqa: N811
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.pipelining.microbatch import merge_chunks, split_args_kwargs_into_chunks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = [
    "PythonNode",
    "ReplicatedByDdp",
    "accumulation_hooks",
    "ddp_of",
    "donates_buffers",
    "has_hooks",
    "is_compiled",
    "is_reentrant_checkpoint",
    "is_sharded",
    "keep_in_reduce_dtype",
    "merge_chunks",
    "parameter_groups",
    "reduce_replicated",
    "reduce_sharded",
    "reset_sharded",
    "shares_memory",
    "split_args_kwargs_into_chunks",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]


def shares_memory(tensor: Tensor) -> bool:
    """True if other tensors, or other parts of torch, hold the memory of a strided tensor too."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # by the tensor, and by ``storage``


def is_compiled(kind: type) -> bool:
    """True if nodes of this type in an autograd graph are compiled functions."""
    return issubclass(kind, PythonNode) and hasattr(getattr(kind, "_forward_cls", None), "_aot_id")


def donates_buffers() -> bool:
    """True if compiled functions may donate their saved tensors to the memory plan of their backward pass.

    They then raise an error if their backward pass runs with ``retain_graph=True``.
    """
    return bool(functorch_config.donated_buffer)


def is_reentrant_checkpoint(kind: type) -> bool:
    """True if nodes of this type are checkpoints with ``use_reentrant=True``.

    They raise an error if only some gradients are computed. They have graphs of their own, which are not visible from
    outside.
    """
    return issubclass(kind, PythonNode) and kind.__name__ == "CheckpointFunctionBackward"


def has_hooks(tensor: Tensor) -> bool:
    """True if a tensor has a hook from `Tensor.register_hook` that was not removed."""
    return bool(tensor._backward_hooks)


def accumulation_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], object]]:
    """Return the table in which autograd looks up the hooks from `register_post_accumulate_grad_hook`."""
    return parameter._post_accumulate_grad_hooks or {}


def parameter_groups(module: Any) -> list[Any]:
    """Return the groups in which an FSDP2 module gathers its own parameters.

    The list is empty if modules inside it have all the parameters.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch < 2.12


def is_sharded(module: Any) -> bool:
    """True if an FSDP2 module has parameters of its own that are sharded, and not only replicated."""
    return any(isinstance(group.mesh_info, FSDPMeshInfo) for group in parameter_groups(module))


def keep_in_reduce_dtype(module: Any) -> None:
    """Add up the unsharded gradients of a microbatch in the type in which they will be reduced.

    This is what FSDP2 does after a backward pass whose gradients are not reduced yet. Since torch 2.15, autograd does
    it.
    """
    for group in parameter_groups(module):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param") and hasattr(parameter, "to_accumulated_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_sharded(root: Any) -> None:
    """Reduce the gradients of ``root`` and of all modules inside, as FSDP2 does at the end of a backward pass."""
    state = root._get_fsdp_state()
    state._lazy_init()
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False  # torch 2.15, if no backward pass has begun
    state._root_post_backward_final_callback()


def reset_sharded(root: Any) -> None:
    """Reset an FSDP2 module and all modules inside it after an unfinished pass, and drop their unreduced gradients."""
    root_state = root._get_fsdp_state()
    if hasattr(root_state, "_reset_iter_state"):  # not in torch 2.11
        root_state._lazy_init()
        root_state._reset_iter_state()
    for module in root.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = module._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        for group in parameter_groups(module):
            group._training_state = idle
            for parameter in group.fsdp_params:
                if hasattr(parameter, "to_accumulated_grad_if_needed"):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def ddp_of(module: Any) -> DistributedDataParallel | None:
    """Return the DDP module that reduces the gradients of a module to which ``replicate`` of torch was applied.

    It is None before the first forward pass, which creates it.
    """
    return getattr(replicate.state(module), "_ddp", None)


def reduce_replicated(module: DistributedDataParallel) -> None:
    """Reduce the gradients of a DDP module, although no forward pass precedes this.

    DDP reduces a gradient when a backward pass adds to it, so this adds zeros. With ``find_unused_parameters=True``,
    DDP counts a parameter as unused unless a graph leads to it. There, parameters without a gradient stay unused, but
    at least one must be used, or this rank would not take part in the reduction at all.

    As after any backward pass that reduces gradients, the next forward pass broadcasts the buffers.
    """
    module.require_forward_param_sync = True
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not module.find_unused_parameters:
        module.reducer.prepare_for_backward([])
        reached: list[Tensor] = list(parameters)
    else:
        used = [parameter for parameter in parameters if parameter.grad is not None] or parameters[:1]
        reached = [parameter.view_as(parameter) for parameter in used]
        module.reducer.prepare_for_backward(reached)
    torch.autograd.backward(reached, [each.new_zeros(()).expand_as(each) for each in reached])
