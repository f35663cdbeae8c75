"""``SequenceParallel``: run a norm on this rank's part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel

from .._torch import compiling, reparametrized
from ..collective.arguments import group_name
from .forward import override
from .gradients import summed_gradients
from .layouts import even_or_whole, same, to_local_input, to_output
from .sharding import distribute, local_of, require_mesh


class SequenceParallel(parallel.SequenceParallel):
    """Run a norm, or another module whose parameters every rank has, on this rank's part of the sequence.

    Equivalent, in plain PyTorch, to ``module(x.chunk(world, sequence_dim)[r])`` on rank r. There are three differences
    to torch's `SequenceParallel`:

    - The module computes with plain tensors instead of DTensors, which takes less time.
    - The gradients of its parameters are already summed over ranks (``Replicate()``), instead of partial sums.
    - Every rank gets the values of rank 0.

    Modules without parameters, such as dropout, and modules whose parameters are in submodules get torch's own style
    and compute with DTensors. So does a module of which a parameter is computed (parametrized, pruned).

    Args:
        sequence_dim, use_local_output: as in torch's style.

    Raises:
        ValueError: the mesh has several dimensions, or a parameter is a DTensor already. A call of the module raises it
            if the input is a DTensor that the ranks cannot share evenly.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_mesh(device_mesh, "SequenceParallel")
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own or len(own) < len(list(module.parameters())) or _computes(module, own):
            return super()._apply(module, device_mesh)
        for name in own:
            distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
        (layout,) = self.sequence_sharding
        sequence = SequenceLayout(device_mesh, group_name(device_mesh), layout, self.use_local_output, tuple(own))
        override(module, _forward, sequence_layout=sequence, forward_of_shard=module.forward)
        return module


def _computes(module: nn.Module, own: list[str]) -> bool:
    """True if a hook computes a tensor of the module, such as ``weight`` from ``weight_orig`` (pruning)."""
    computed = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    return any(name.startswith(f"{each}_") for each in computed for name in own)


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The layout of a module's input and output, and the names of its parameters; see `SequenceParallel`."""

    mesh: DeviceMesh
    group: str
    layout: Shard
    use_local_output: bool
    names: tuple[str, ...]

    def __deepcopy__(self, memo: Any) -> SequenceLayout:
        return self  # it never changes, and ranks are not copied with a model

    def shard_of(self, x: Tensor) -> Tensor:
        """Return this rank's part of an input."""
        if isinstance(x, DTensor) and not even_or_whole(self.layout, x):
            raise ValueError(
                f"SequenceParallel: dimension {self.layout.dim} of the input of shape {tuple(x.shape)} cannot be "
                f"shared evenly by {self.mesh.size()} ranks: pad it"
            )
        return to_local_input(x, self.mesh, self.layout, self._accepts, self.layout)[0]

    def _accepts(self, layout: Placement, x: Tensor) -> bool:
        return same(layout, self.layout, x.dim())


def _forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layout: SequenceLayout = module.sequence_layout
    shard = layout.shard_of(input)
    if any(name not in module._parameters for name in layout.names):  # computed by a parametrization, or a hook
        given = DTensor.from_local(shard, layout.mesh, [layout.layout], run_check=False)
        whole = module.forward_of_shard(given, *args, **kwargs)
        output = whole.redistribute(placements=[layout.layout]).to_local()
    else:
        output = _with_plain_parameters(module, layout, (shard, *args), kwargs)
    return to_output(output, layout.mesh, layout.layout, layout.layout, layout.use_local_output)


def _with_plain_parameters(module: Any, layout: SequenceLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module with plain tensors as its own parameters. Their gradients are summed over ranks."""
    own = dict(module.named_parameters(recurse=False))
    local = [local_of(parameter, layout.mesh, Replicate()) for parameter in own.values()]
    plain = dict(zip(own, summed_gradients(layout.group, *local), strict=True))
    forward = module.forward_of_shard
    bound = isinstance(forward, MethodType) and getattr(forward, "__self__", None) is module
    if compiling() or not bound:
        with reparametrized(module, plain):
            return forward(*args, **kwargs)
    # A twin of the module has the plain tensors, because other threads may be in the forward of the module too.
    twin = object.__new__(type(module))
    attributes = vars(twin)
    attributes.update(vars(module), _parameters={**module._parameters, **plain})
    output = forward.__func__(twin, *args, **kwargs)
    attributes["_parameters"] = module._parameters
    vars(module).update((name, each) for name, each in attributes.items() if vars(module).get(name) is not each)
    return output
