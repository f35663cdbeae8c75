"""``SequenceParallel``: run a norm on this rank's part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel

from .._torch import reparametrized
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
    and compute with DTensors.

    Args:
        sequence_dim, use_local_output: as in torch's style.

    Raises:
        ValueError: the mesh has several dimensions, or a parameter is a DTensor already. A call of the module raises it
            if the input is a DTensor that the ranks cannot share evenly.
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
    """The layout of a module's input and output; see `SequenceParallel`."""

    mesh: DeviceMesh
    group: str
    layout: Shard
    use_local_output: bool

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
    with _with_plain_parameters(module, layout):
        output = module.forward_of_shard(shard, *args, **kwargs)
    return to_output(output, layout.mesh, layout.layout, layout.layout, layout.use_local_output)


def _with_plain_parameters(module: nn.Module, layout: SequenceLayout) -> AbstractContextManager[Any]:
    """Replace the module's own parameters by plain tensors inside the block. Their gradients are summed over ranks."""
    own = dict(module.named_parameters(recurse=False))
    local = [local_of(parameter, layout.mesh, Replicate()) for parameter in own.values()]
    plain = summed_gradients(layout.group, *local)
    if torch.compiler.is_compiling():
        return reparametrized(module, dict(zip(own, plain, strict=True)))
    return _replaced(module, own, plain)


@contextmanager
def _replaced(module: nn.Module, own: dict[str, nn.Parameter], plain: Sequence[Tensor]) -> Iterator[None]:
    """Restore ``own``, and not what was there before: another thread may be in the module's forward too."""
    module._parameters.update(zip(own, plain, strict=True))  # type: ignore[arg-type]  # setattr accepts parameters only
    try:
        yield
    finally:
        module._parameters.update(own)
