"""``SequenceParallel``: norms that run on this rank's part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel

from ..collective.arguments import group_name
from .forward import override
from .gradients import summed_gradients
from .layouts import even_or_whole, local_in, out, same
from .sharding import distribute, local_of, require_mesh


class SequenceParallel(parallel.SequenceParallel):
    """Run a norm, or another module whose parameters every rank has, on this rank's part of the sequence.

    Equivalent, in plain PyTorch, to ``module(x.chunk(world, sequence_dim)[r])`` on rank r. It is torch's
    `SequenceParallel` with three differences: the module computes with plain tensors and not with DTensors, which takes
    less time; its parameters' gradients come out summed over ranks (``Replicate()``), and not as something still to be
    summed; and every rank gets the values that rank 0 has.

    Modules without parameters, such as dropout, and modules whose parameters are in submodules are torch's own: they
    compute with DTensors.

    Args:
        sequence_dim, use_local_output: as in torch's style.

    Raises:
        ValueError: the mesh has several dimensions; a parameter is a DTensor already; or, when the module is called,
            its input is a DTensor that ranks cannot share evenly.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_mesh(device_mesh, "SequenceParallel")
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own or len(own) < len(list(module.parameters())):
            return super()._apply(module, device_mesh)
        for name in own:
            distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
        (layout,) = self.sequence_sharding
        sequence = SequenceLayout(device_mesh, group_name(device_mesh), layout, self.use_local_output)
        override(module, _forward, sequence_layout=sequence, forward_of_shard=module.forward)
        return module


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """How a module's input and output are laid out; see `SequenceParallel`."""

    mesh: DeviceMesh
    group: str
    layout: Shard
    use_local_output: bool

    def __deepcopy__(self, memo: Any) -> SequenceLayout:
        return self  # it never changes, and ranks are not copied with a model

    def shard_of(self, x: Tensor) -> Tensor:
        """This rank's part of an input."""
        if isinstance(x, DTensor) and not even_or_whole(self.layout, x):
            raise ValueError(
                f"SequenceParallel: dimension {self.layout.dim} of the input of shape {tuple(x.shape)} cannot be "
                f"shared evenly by {self.mesh.size()} ranks: pad it"
            )
        return local_in(x, self.mesh, self.layout, self._taken, self.layout)[0]

    def _taken(self, layout: Placement, x: Tensor) -> bool:
        return same(layout, self.layout, x.dim())


def _forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layout: SequenceLayout = module.sequence_layout
    shard = layout.shard_of(input)
    with _plain_parameters(module, layout.group):
        output = module.forward_of_shard(shard, *args, **kwargs)
    return out(output, layout.mesh, layout.layout, layout.layout, layout.use_local_output)


@contextmanager
def _plain_parameters(module: nn.Module, group: str) -> Iterator[None]:
    """Inside it the module's parameters are plain tensors, whose gradients are summed over ranks."""
    own = dict(module.named_parameters(recurse=False))
    plain = summed_gradients(group, *(local_of(parameter) for parameter in own.values()))
    module._parameters.update(zip(own, plain, strict=True))  # type: ignore[arg-type]  # setattr takes parameters only
    try:
        yield
    finally:
        module._parameters.update(own)
