"""``shard_linears``: replace the linear layers of a model by layers whose weights are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from ...collective.arguments import Group
from .._torch import has_hooks, ignore_in_ddp
from .sharded_linear import ShardedLinear
from .shards import mesh_of


class ShardedLinears(NamedTuple):
    """What `shard_linears` returns.

    Attributes:
        sharded: the names of the layers that it replaced.
        left: the names of the linear layers that it did not replace, with the reason.
    """

    sharded: list[str]
    left: dict[str, str]


def shard_linears(
    model: nn.Module,
    group: Group,
    *,
    shard_dim: int = 0,
    choose: Callable[[str, nn.Linear], bool] | None = None,
) -> ShardedLinears:
    """Replace every ``nn.Linear`` in ``model`` by a `ShardedLinear` with this rank's shards of its parameters.

    The gradients of the replaced layers' parameters are averaged over the ranks. Those of all other parameters are not:
    afterwards, wrap this same module in ``DistributedDataParallel``, which ignores the sharded parameters (an attribute
    of ``model`` tells it to), or pass it to ``fully_shard`` with the sharded parameters as ``ignored_params``. Create
    the optimizer afterwards too.

    Layers that share a parameter share its shards. These layers are not replaced: subclasses of ``nn.Linear``, which
    may compute something else; layers with hooks; the layers of ``nn.TransformerEncoderLayer``; layers whose parameter
    is a DTensor, or is shared with a module that is not replaced, such as an embedding.

    Args:
        model: a model with the same values on all ranks.
        group: the data-parallel ranks: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        shard_dim: see `ShardedLinear`.
        choose: called with the name and module of a layer, returns whether to replace it; by default all are replaced.

    Returns:
        `ShardedLinears`: which layers were replaced, and which were not and why.

    Raises:
        ValueError: ``model`` is itself a linear layer, which cannot be replaced in place, or see `ShardedLinear`.
    """
    if isinstance(model, nn.Linear):
        raise ValueError("the model is itself a linear layer: use ShardedLinear.from_linear instead")
    linears = {name: each for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, nn.Linear)}
    left = {name: why for name, linear in linears.items() if (why := _reason(model, name, linear, choose))}
    _leave_what_is_shared(model, linears, left)
    made: dict[nn.Module, ShardedLinear] = {}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    ignored = []
    for name, linear in linears.items():
        if name in left:
            continue
        if linear not in made:
            made[linear] = _made(linear, group, shard_dim, parameters)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[linear])
        ignored += [f"{name}.{key}" for key, _ in linear.named_parameters()]
    ignore_in_ddp(model, ignored)
    return ShardedLinears([name for name in linears if name not in left], left)


def _reason(model: nn.Module, name: str, linear: nn.Linear, choose: Callable[[str, nn.Linear], bool] | None) -> str:
    """Return why a layer is not replaced; empty if it is."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, a subclass of nn.Linear"
    if "forward" in vars(linear):
        return "its forward was replaced on the instance, and would be lost"
    if has_hooks(linear):
        return "it has hooks, which would be lost"
    if any(isinstance(parameter, DTensor) for parameter in linear.parameters()):
        return "its parameters are DTensors already"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer passes its weight to a kernel of its own in evaluation"
    if choose is not None and not choose(name, linear):
        return "it was not chosen"
    return ""


def _leave_what_is_shared(model: nn.Module, linears: dict[str, nn.Linear], left: dict[str, str]) -> None:
    """Also leave the layers that share a parameter with a module that is not replaced."""
    holders = [
        (name, set(module.parameters(recurse=False))) for name, module in model.named_modules(remove_duplicate=False)
    ]
    found = True
    while found:
        found = False
        for name, linear in linears.items():
            mine = set(linear.parameters())
            others = (other for other, held in holders if held & mine and (other in left or other not in linears))
            if name not in left and (other := next(others, None)) is not None:
                left[name], found = f"it shares a parameter with {other!r}", True


def _made(
    linear: nn.Linear, group: Group, shard_dim: int, parameters: dict[nn.Parameter, nn.Parameter]
) -> ShardedLinear:
    """Return the layer that replaces ``linear``. Parameters that were shared stay shared."""
    made = ShardedLinear.from_linear(linear, mesh_of(group, linear.weight), shard_dim=shard_dim)
    for name, whole in linear.named_parameters():
        made.register_parameter(name, parameters.setdefault(whole, getattr(made, name)))
    return made
