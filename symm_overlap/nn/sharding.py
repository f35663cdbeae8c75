"""Parameters as DTensors: each rank keeps its shard, and torch sees the whole parameter.

The shards equal those of torch's own styles, so checkpoints, optimizers and `full_tensor` work as they do there. If a
model computes several outputs as one, such as q, k and v of GPT-2's ``c_attn``, each output is sharded: rank r has its
part of each, one below the other. So are several inputs that are concatenated. torch calls this a strided shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import is_parametrized

from ..collective.write_counts import counted
from ..custom_gradient import require_no_transform
from ._torch import strided_shard


def require_mesh(mesh: DeviceMesh, who: str) -> DeviceMesh:
    """Return the mesh if it has one dimension.

    Raises:
        TypeError: it is not a DeviceMesh. ValueError: it has several dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{who}: the mesh is {type(mesh).__name__}: pass a DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(
            f"{who} needs a mesh of one dimension, but {mesh} has {mesh.ndim}: pass one of them, such as mesh['tp']"
        )
    return mesh


def require_shards(size: int, parts: int, mesh: DeviceMesh, what: str) -> None:
    """Raise ValueError if the ranks cannot share each of ``parts`` equal parts of ``size`` elements evenly."""
    if parts < 1 or size % parts:
        raise ValueError(f"{what} {size} cannot be cut into {parts} equal parts")
    if size // parts % mesh.size():
        each = f" in each of {parts} parts" if parts > 1 else ""
        raise ValueError(
            f"{what} {size}: {size // parts}{each} cannot be shared evenly by {mesh.size()} ranks. Pad it, or use "
            "torch's own style for this module"
        )


def sharded(dim: int, parts: int = 1) -> Placement:
    """Return the placement that shards dimension ``dim``, or each of its equal ``parts``."""
    return Shard(dim) if parts == 1 else strided_shard(dim, parts)


def distributed(tensor: Tensor, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None) -> DTensor:
    """Return ``tensor`` as a DTensor, with the values of rank ``src_data_rank`` of the mesh. None: each rank's own."""
    if isinstance(placement, Shard | Replicate):
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=src_data_rank)
    whole = distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=src_data_rank).to_local()
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None)


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None) -> None:
    """Replace the parameter ``name`` of ``module`` by a DTensor.

    A parameter that several modules share stays one parameter.

    Raises:
        ValueError: the parameter is a DTensor already, or it is parametrized, or a hook computes it, or another module
            that shares it has sharded it differently.
    """
    if is_parametrized(module, name):
        raise ValueError(
            f"{name} of {type(module).__name__} is parametrized already: apply the style first, and parametrize it then"
        )
    parameter: nn.Parameter = getattr(module, name)
    if name not in module._parameters:
        raise ValueError(
            f"{name} of {type(module).__name__} is computed by a hook before each call (pruning, weight_norm or the "
            "like): apply the style first, or make it a parameter again (prune.remove, remove_weight_norm)"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(f"{name} of {type(module).__name__} is a DTensor already: apply one style to a module")
    shard = distributed(parameter.data, mesh, placement, src_data_rank)
    module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    share(module, name, parameter)


def refuse_wrong_checkpoints(module: nn.Module, parts: int, mesh: DeviceMesh) -> None:
    """Make checkpoints of strided shards an error where torch would silently store or load the wrong rows.

    That is, in the format of `torch.distributed.checkpoint` itself, which describes the shard of a rank as one block;
    and in any state dict under FSDP2, which shards this rank's part again. (torch 2.11 to 2.13)
    """
    if parts > 1 and mesh.size() > 1:
        module.register_state_dict_post_hook(_refuse_blocks)
        module.register_load_state_dict_pre_hook(_refuse_sharded_twice)


def _refuse_sharded_twice(module: nn.Module, state_dict: Any, prefix: str, *unused: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise RuntimeError(
                f"state dict: {prefix}{name} has several outputs or inputs side by side (parts), of which each is "
                "sharded, and FSDP2 shards it again: torch would compute wrong values for the whole. Save "
                "parameter.to_local() of each rank, use a layer for each, or do not apply FSDP2 to this layer"
            )


def _refuse_blocks(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    _refuse_sharded_twice(module, state_dict, prefix)
    for name in dict(module.named_parameters(recurse=False)):
        value = state_dict.get(prefix + name)

        def refuse(*args: Any, name: str = prefix + name) -> Any:
            raise RuntimeError(
                f"torch.distributed.checkpoint: {name} has several outputs or inputs side by side (parts), of which "
                "each is sharded: torch would store or load the wrong values. Use a full state dict, by "
                "get_model_state_dict and set_model_state_dict with StateDictOptions(full_state_dict=True)"
            )

        if isinstance(value, DTensor):
            for hook in ("__create_write_items__", "__create_chunk_list__"):  # by which it asks for the shards
                setattr(value, hook, refuse)


def share(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give all modules that had ``parameter`` the DTensor that the first of them made of it.

    An attribute of the parameter holds this DTensor, so it is known as long as a module has the parameter.

    Raises:
        ValueError: the DTensor that this module has made is sharded differently.
    """
    mine: Any = getattr(module, name)
    first: Any = made_before(parameter)
    if first is None:
        parameter.symm_overlap_sharded = mine  # type: ignore[attr-defined]
    elif first.device_mesh != mine.device_mesh or first.placements != mine.placements:
        raise ValueError(
            f"{name} of {type(module).__name__} is shared with another module, which has sharded it as "
            f"{first.placements[0]}, but here it would be {mine.placements[0]}: shard both alike, or untie them"
        )
    else:
        module.register_parameter(name, first)


def local_of(
    parameter: Any, mesh: DeviceMesh, placement: Placement, view: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return this rank's part of a parameter in the layout of its module, or ``view`` of it. Gradients flow back to the
    parameter.

    A parameter of another layout is redistributed, as by torch's styles. It may have been loaded by
    ``load_state_dict(..., assign=True)``, or computed by a parametrization.

    Raises:
        TypeError: the parameter is not a DTensor. ValueError: it is on another mesh, as FSDP's shards are.
    """
    require_no_transform()  # torch's own message, from `to_local`, would not help
    if not isinstance(parameter, DTensor):
        raise TypeError(
            "a parameter of a parallel module has been replaced by one that is no DTensor: load values by "
            "load_state_dict from DTensors, or make a DTensor by distribute_tensor"
        )
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"a parameter of a parallel module is on {parameter.device_mesh}, and the module is on {mesh}. If it is "
            "sharded by FSDP2, call the module that fully_shard was applied to, which gathers it (see also "
            "torch.distributed.fsdp.register_fsdp_forward_method)"
        )
    if parameter.placements != (placement,):
        parameter = parameter.redistribute(placements=[placement])
    local = parameter.to_local()
    return counted(local if view is None else view(local), parameter)


def made_before(parameter: nn.Parameter) -> nn.Parameter | None:
    """Return the DTensor that another module has made of this parameter, or None."""
    made: nn.Parameter | None = getattr(parameter, "symm_overlap_sharded", None)
    return made
