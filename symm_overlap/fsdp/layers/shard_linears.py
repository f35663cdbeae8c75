"""``shard_linears``: the linear layers of a model become layers whose weights are sharded."""

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
    """What `shard_linears` has done.

    Attributes:
        sharded: the names of the layers that it replaced.
        left: the names of the linear layers that it left as they are, with the reason.
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

    The gradients of the layers' parameters are means over the ranks. Those of all other parameters are not: wrap this
    very module in ``DistributedDataParallel`` afterwards, which leaves the sharded parameters alone (an attribute of
    ``model`` tells it so), or give it to ``fully_shard`` with the sharded ones as ``ignored_params``. Make the
    optimizer afterwards too.

    Layers that share a parameter share its shards. Left as they are: subclasses of ``nn.Linear``, which may compute
    something else; layers with hooks; those of ``nn.TransformerEncoderLayer``; layers whose parameter is a DTensor, or
    belongs to a module that is left, such as an embedding.

    Args:
        model: of the same values on all ranks.
        group: the ranks of data parallelism: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        shard_dim: see `ShardedLinear`.
        choose: which layers, by name and module; all by default.

    Raises:
        ValueError: ``model`` is a linear layer itself, which cannot be replaced in place, or see `ShardedLinear`.
    """
    if isinstance(model, nn.Linear):
        raise ValueError("the model is one linear layer: make the sharded one by ShardedLinear.from_linear")
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
    """Why a layer is left as it is; empty if it is not."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, not an nn.Linear"
    if has_hooks(linear):
        return "it has hooks, which would be lost"
    if any(isinstance(parameter, DTensor) for parameter in linear.parameters()):
        return "its parameters are DTensors already"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer hands its weight to a kernel of its own in evaluation"
    if choose is not None and not choose(name, linear):
        return "it was not chosen"
    return ""


def _leave_what_is_shared(model: nn.Module, linears: dict[str, nn.Linear], left: dict[str, str]) -> None:
    """Leave the layers too that share a parameter with a module that is left."""
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
    """The layer that takes the place of ``linear``. Parameters that were one stay one."""
    made = ShardedLinear.from_linear(linear, mesh_of(group, linear.weight), shard_dim=shard_dim)
    for name, whole in linear.named_parameters():
        made.register_parameter(name, parameters.setdefault(whole, getattr(made, name)))
    return made
