"""``ColwiseParallel`` and ``RowwiseParallel``: torch's styles, with linear layers that run the ops.

The module keeps its class, its names and the names of its parameters. Its parameters become the same DTensors as with
torch's styles, and its ``forward`` becomes the one of `symm_overlap.nn.linear`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, parallel

from ..collective.arguments import group_name
from . import embedding
from .forward import override
from .linear import Column, Layout, Row
from .offer import without_offer
from .sharding import distribute, refuse_wrong_checkpoints, require_mesh, require_shards, share


def _arrived(
    output_layouts: tuple[Placement, ...], use_local_output: bool, module: Any, output: DTensor, mesh: DeviceMesh
) -> Tensor:
    """Return the output of an embedding in the wanted layout, after its collective is complete.

    torch's own styles return a tensor whose collective is still in flight. A compiled module that gets such a tensor as
    its input returns no gradient for it, or a wrong one.
    """
    if output.placements != output_layouts:
        output = output.redistribute(placements=output_layouts)
    return output.to_local() if use_local_output else output


class ColwiseParallel(parallel.ColwiseParallel):
    """Shard a linear layer's outputs, as torch's `ColwiseParallel` does.

    Equivalent, in plain PyTorch, to this on rank r::

        F.linear(all_gather(x), weight.chunk(world)[r], bias.chunk(world)[r])

    For ``nn.Linear``, and for modules with a weight of shape (in, out), such as transformers' ``Conv1D``. With input
    ``Shard(d)`` the layer is an all-gather-matmul. With input ``Replicate()`` it is a matmul, and the gradient of its
    input is a matmul-all-reduce.

    An ``nn.Embedding`` is sharded by its features: every rank looks up its part of them.

    Args:
        parts: how many equal outputs, side by side, form the layer's output, such as 3 for q, k and v in one. Each
            output is sharded.
        contiguous: whether the output is contiguous, as torch's is. If the input is gathered along another dimension
            than the first and the model does not need contiguous outputs, False saves a copy.
        input_layouts, output_layouts, use_local_output: as in torch's style.

    Raises:
        ValueError: the ranks cannot share the outputs evenly, the mesh has several dimensions, or a parameter is a
            DTensor already.
        NotImplementedError: the module is none of these.
    """

    _prepare_output_fn = staticmethod(_arrived)

    def __init__(self, *, parts: int = 1, contiguous: bool = True, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.parts, self.contiguous = parts, contiguous

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_mesh(device_mesh, "ColwiseParallel")
        if isinstance(module, nn.Embedding):
            return _embedding(self, embedding.COLUMNS, super()._apply, module, device_mesh)
        transposed = _transposed(module, "ColwiseParallel")
        outputs = _weight_shape(module)[1 if transposed else 0]
        require_shards(outputs, self.parts, device_mesh, f"ColwiseParallel: {type(module).__name__} with out_features")
        _install(Column, self, module, device_mesh, transposed, parts=self.parts, contiguous=self.contiguous)
        refuse_wrong_checkpoints(module, self.parts, device_mesh)
        return module


class RowwiseParallel(parallel.RowwiseParallel):
    """Shard a linear layer's inputs, as torch's `RowwiseParallel` does.

    Equivalent, in plain PyTorch, to this on rank r::

        reduce_scatter(F.linear(x, weight.chunk(world, 1)[r])) + bias       # or all_reduce, for Replicate()

    For ``nn.Linear``, and for modules with a weight of shape (in, out), such as transformers' ``Conv1D``. With output
    ``Shard(d)`` the layer is a matmul-reduce-scatter, with output ``Replicate()`` a matmul-all-reduce. With output
    ``Partial()`` it is a matmul without communication: the outputs of the ranks add up to the layer's output, and each
    contains an equal part of the bias.

    An ``nn.Embedding`` is sharded by its vocabulary: every rank looks up the indices in its part, and the results are
    reduced, to output ``Shard(d)`` or ``Replicate()``.

    Args:
        parts: how many equal inputs, side by side, form the layer's input, such as outputs of several layers that are
            concatenated. Each input is sharded.
        input_layouts, output_layouts, use_local_output: as in torch's style.

    Raises:
        ValueError: the ranks cannot share the inputs evenly, the mesh has several dimensions, or a parameter is a
            DTensor already.
        NotImplementedError: the module is none of these.
    """

    _prepare_output_fn = staticmethod(_arrived)

    def __init__(self, *, parts: int = 1, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_mesh(device_mesh, "RowwiseParallel")
        if isinstance(module, nn.Embedding):
            return _embedding(self, embedding.ROWS, super()._apply, module, device_mesh)
        transposed = _transposed(module, "RowwiseParallel")
        inputs = _weight_shape(module)[0 if transposed else 1]
        require_shards(inputs, self.parts, device_mesh, f"RowwiseParallel: {type(module).__name__} with in_features")
        _install(Row, self, module, device_mesh, transposed, parts=self.parts)
        refuse_wrong_checkpoints(module, self.parts, device_mesh)
        return module


def _transposed(module: Any, style: str) -> bool:
    """True if the module's weight has shape (in, out).

    Raises:
        NotImplementedError: the module is not a known linear layer, or its forward was replaced.
    """
    replaced = vars(module).get("forward")
    if replaced is not None and getattr(replaced, "__func__", None) is not _forward:  # `distribute` rejects that one
        raise NotImplementedError(
            f"{style}: the forward of this {type(module).__name__} was replaced on the instance, and the style would "
            "replace it again, so that it would be lost: apply the style first, or use torch's own style"
        )
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return False
    # transformers' Conv1D is recognised by its attributes: nx is the number of inputs, nf the number of outputs.
    names = {*vars(module), *dict(module.named_parameters(recurse=False))}
    if {"nf", "nx", "weight", "bias"} <= names and _weight_shape(module) == (module.nx, module.nf):
        return True
    kind = type(module)
    own = ", whose forward is not that of nn.Linear" if isinstance(module, nn.Linear) else ""
    raise NotImplementedError(
        f"{style} is for nn.Linear, nn.Embedding and transformers' Conv1D, not for "
        f"{kind.__module__}.{kind.__qualname__}{own}: use torch's own style, or symm_overlap's ops in a module of your "
        "own"
    )


def _weight_shape(module: Any) -> tuple[int, ...]:
    return tuple(module.weight.shape)


def _install(
    layer: type[Layout], style: Any, module: nn.Module, mesh: DeviceMesh, transposed: bool, **more: Any
) -> nn.Module:
    ((given,), (wanted,)) = style.input_layouts, style.output_layouts
    layout = layer(mesh, group_name(mesh), given, wanted, style.use_local_output, transposed, **more)
    for name, placement in zip(("weight", "bias"), layout.placements, strict=True):
        if getattr(module, name) is not None:
            distribute(module, name, mesh, placement, style.src_data_rank)
    without_offer(module)
    override(module, _forward, parallel=layout)
    return module


def _forward(module: Any, input: Tensor) -> Tensor:
    output: Tensor = module.parallel(module, input)
    return output


def _embedding(style: Any, dim: int, apply: Any, module: nn.Embedding, mesh: DeviceMesh) -> nn.Module:
    """Apply the style to an embedding, or torch's style. Its weight may also be the weight of a linear layer."""
    ((given,), (wanted,)) = style.input_layouts, style.output_layouts
    if embedding.is_ours(module, mesh, dim, wanted):
        embedding.install(module, mesh, dim, (given, wanted), style.use_local_output, style.src_data_rank)
        return module
    before: Any = module.weight
    apply(module, mesh)
    share(module, "weight", before)
    return module
