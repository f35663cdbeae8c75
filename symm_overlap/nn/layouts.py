"""Convert the inputs and outputs of a parallel module between local tensors, DTensors and layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._torch import compiling
from ..collective import all_gather, reduce_scatter
from ..collective.arguments import group_name
from ._torch import all_to_all
from .gradients import sum_to_replicated

REDUCED = torch.float32, torch.float64, torch.bfloat16, torch.float16
"""The dtypes that the ops reduce."""


def as_dtensor(x: Tensor, mesh: DeviceMesh, layout: Placement, what: str = "the input") -> DTensor:
    """Return ``x`` if it is a DTensor, else the DTensor of which ``x`` is this rank's part.

    Raises:
        TypeError: ``x`` is not a tensor. ValueError: ``x`` is a DTensor on another mesh. Their messages begin with
            ``what``.
    """
    if isinstance(x, DTensor):
        if x.device_mesh != mesh:
            raise ValueError(f"{what} is a DTensor on {x.device_mesh}, and the module is on {mesh}: use one mesh")
        return x
    require_tensor(x, what)
    return DTensor.from_local(x, mesh, [layout], run_check=False)


def require_tensor(x: object, what: str = "the input") -> None:
    """Raise TypeError if ``x`` is not a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} is {type(x).__name__}: pass a tensor or a DTensor")


def to_local_input(
    x: Tensor, mesh: DeviceMesh, layout: Placement, accepts: Callable[[Placement, Tensor], bool], wanted: Placement
) -> tuple[Tensor, Placement]:
    """Return this rank's part of an input, and its layout.

    Args:
        layout: the layout of ``x`` if it is a local tensor. A DTensor has its own layout.
        accepts: whether the module accepts an input of this layout. Any other layout is redistributed to ``wanted``.
    """
    if not isinstance(x, DTensor):
        require_tensor(x)
        return (x, layout) if accepts(layout, x) else (moved(x, mesh, layout, wanted), wanted)
    whole = as_dtensor(x, mesh, layout)
    if not accepts(whole.placements[0], whole):
        whole = whole.redistribute(placements=[wanted])
    return whole.to_local(), whole.placements[0]


def to_output(y: Tensor, mesh: DeviceMesh, layout: Placement, wanted: Placement, local: bool) -> Tensor:
    """Return the output of which ``y`` is this rank's part in the wanted layout: a DTensor, or its local part."""
    stays = same(layout, wanted, y.dim())
    if local:
        return y if stays else moved(y, mesh, layout, wanted)
    whole = DTensor.from_local(y, mesh, [layout], run_check=False)
    return whole if stays else whole.redistribute(placements=[wanted])


def moved(x: Tensor, mesh: DeviceMesh, layout: Placement, wanted: Placement) -> Tensor:
    """Return this rank's part of a tensor in the wanted layout. ``x`` is its part in another layout.

    If it is simple, this takes no DTensor: a partial tensor is reduced through symmetric memory, and without gradients,
    any other is gathered, cut or exchanged. That takes less time, and torch.export accepts no DTensor there. Compiled
    code is left to DTensor, for whose collectives the compiler pass has patterns.
    """
    if torch.compiler.is_exporting() or not compiling():
        if _is_sum(layout, x.dtype):
            total, layout = summed(x, mesh, wanted)
            return total if same(layout, wanted, x.dim()) else moved(total, mesh, layout, wanted)
        simple = None if torch.is_grad_enabled() else _moved_simply(x, mesh, layout, wanted)
        if simple is not None:
            return simple
    whole = DTensor.from_local(x, mesh, [layout], run_check=False)
    return whole.redistribute(placements=[wanted]).to_local()


def _moved_simply(x: Tensor, mesh: DeviceMesh, layout: Placement, wanted: Placement) -> Tensor | None:
    """Return this rank's part in the wanted layout, without gradients: None if a part is empty or not an even block."""
    if isinstance(wanted, Replicate) and _is_in(layout, x):
        return all_gather(x, dim_of(layout, x.dim()), group_name(mesh))
    if not _is_in(wanted, x) or x.shape[dim := dim_of(wanted, x.dim())] % mesh.size() or x.numel() == 0:
        return None
    parts = x.chunk(mesh.size(), dim)
    if isinstance(layout, Replicate):
        return parts[mesh.get_local_rank()].clone()  # to which the module may write
    return torch.cat(all_to_all(parts, group_name(mesh)), dim_of(layout, x.dim())) if _is_in(layout, x) else None


def _is_sum(layout: Placement, dtype: torch.dtype) -> bool:
    """True if a tensor is the sum of all ranks' parts, and the ops reduce its dtype."""
    return type(layout) is Partial and layout.reduce_op == "sum" and dtype in REDUCED


def summed(part: Tensor, mesh: DeviceMesh, wanted: Placement) -> tuple[Tensor, Placement]:
    """Return the sum of all ranks' tensors, and its layout: whole on every rank, or as wanted if that is even."""
    if _is_in(wanted, part) and part.shape[dim := dim_of(wanted, part.dim())] % mesh.size() == 0:
        return reduce_scatter(part, "sum", dim, group_name(mesh)), wanted
    return sum_to_replicated(group_name(mesh), part), Replicate()


def _is_in(layout: Placement, x: Tensor) -> bool:
    """True if a layout shards a dimension that ``x`` has, in one block for each rank."""
    return type(layout) is Shard and -x.dim() <= layout.dim < x.dim()


def same(one: Placement, other: Placement, dims: int) -> bool:
    """True if two layouts of a tensor with ``dims`` dimensions are equal. ``Shard(-1)`` means the last dimension."""
    return one == other or (is_shard(one) and is_shard(other) and dim_of(one, dims) == dim_of(other, dims))


def is_shard(layout: Placement) -> bool:
    """True if each rank has one block along a dimension."""
    return isinstance(layout, Shard)


def dim_of(layout: Placement, dims: int) -> int:
    """Return the sharded dimension, counted from 0. A dimension that is out of range is returned unchanged."""
    assert isinstance(layout, Shard)
    return layout.dim % dims if -dims <= layout.dim < dims else layout.dim


def even_or_whole(layout: Placement, x: Tensor) -> bool:
    """True if a gather accepts this layout: blocks of one size, or the whole tensor on every rank."""
    if isinstance(x, DTensor) and is_shard(layout):
        return x.shape[dim_of(layout, x.dim())] % x.device_mesh.size() == 0
    return is_shard(layout) or isinstance(layout, Replicate)
