"""Compute a linear layer whose weight is sharded by columns or by rows of ``x @ weight``.

========  =====================  =====================================  ====================================
layer     input, output          forward                                gradient of the input
========  =====================  =====================================  ====================================
column    Shard(d), Shard(-1)    all-gather-matmul along d              matmul-reduce-scatter
column    Replicate, Shard(-1)   matmul                                 matmul-all-reduce
row       Shard(-1), Shard(d)    matmul-reduce-scatter along d          all-gather-matmul
row       Shard(-1), Replicate   matmul-all-reduce                      matmul
row       Shard(-1), Partial     matmul                                 matmul
========  =====================  =====================================  ====================================

Any other layout is redistributed: an input first, an output last (layouts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..collective import all_gather_matmul, matmul_reduce_scatter
from .gradients import matmul_to_replicated, partial_sum, replicated_matmuls, summed_gradients
from .layouts import dim_of, even_or_whole, is_shard, require_tensor, same, to_local_input, to_output
from .memory_order import contiguous_gradient, transposed
from .offer import Offer, offered, with_offers
from .sharding import local_of, sharded

LAST = Shard(-1)

_Self = TypeVar("_Self")


@dataclass(frozen=True, eq=False)
class Layout:
    """How a parallel linear layer is laid out on the ranks, with its input and output.

    Attributes:
        mesh, group: the one-dimensional mesh of ranks, and the name of its group.
        input, output: the layouts of the input (if it is not a DTensor) and of the output.
        use_local_output: whether the output is this rank's local tensor instead of a DTensor.
        parts: how many equal outputs, side by side, form the output of a column-parallel layer, or how many equal
            inputs form the input of a row-parallel one.
        transposed: whether the weight has shape (in, out), as in ``Conv1D``, instead of (out, in).
        contiguous: whether a column-parallel layer's output is made contiguous. The computed output has the gathered
            dimension first in memory.
    """

    mesh: DeviceMesh
    group: str
    input: Placement
    output: Placement
    use_local_output: bool
    transposed: bool = False
    parts: int = 1
    contiguous: bool = True

    def __deepcopy__(self: _Self, memo: Any) -> _Self:
        return self  # it never changes, and ranks are not copied with a model

    @cached_property
    def placements(self) -> tuple[Placement, Placement]:
        """How the weight and the bias are sharded."""
        raise NotImplementedError

    def weight(self, module: nn.Module) -> Tensor:
        """Return the module's weight on this rank, as the right-hand side of a matmul: (in, out)."""
        return local_of(module.weight, self.mesh, self.placements[0], None if self.transposed else transposed)

    def bias(self, module: nn.Module) -> Tensor | None:
        """Return the module's bias on this rank."""
        return None if module.bias is None else local_of(module.bias, self.mesh, self.placements[1])


class Column(Layout):
    """A layer whose outputs are sharded: rank r computes its part of the output from the whole input."""

    @cached_property
    def placements(self) -> tuple[Placement, Placement]:
        """How the weight and the bias are sharded: each of the layer's outputs is."""
        return sharded(1 if self.transposed else 0, self.parts), sharded(0, self.parts)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return this layer's output."""
        product = offered(module, x)
        if product is None:
            (product,) = self.products(*self.local_input(x), [self.weight(module)], [self.bias(module)])
        return self.finish(product)

    def local_input(self, x: Tensor) -> tuple[Tensor, Placement]:
        """Return this rank's part of the input, and its layout: a shard or the whole."""
        return to_local_input(x, self.mesh, self.input, even_or_whole, Replicate())

    def products(
        self, x: Tensor, layout: Placement, Bs: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return the products of the whole input with each of ``Bs``, plus the biases, in one exchange."""
        if is_shard(layout) and x.dim() == 1 and dim_of(layout, 1) == 0:  # the op needs two dimensions
            return [product.squeeze(0) for product in self.products(x.unsqueeze(0), LAST, Bs, biases)]
        if is_shard(layout):
            return all_gather_matmul(x, Bs, dim_of(layout, x.dim()), self.group, return_A=False, biases=biases)[1]
        return replicated_matmuls(x, Bs, biases, self.group)

    def finish(self, product: Tensor) -> Tensor:
        """Return the layer's output. ``product`` is this rank's part of it."""
        if self.contiguous:
            product = product.contiguous()
        layout = sharded(product.dim() - 1, self.parts)
        wanted = layout if same(self.output, LAST, product.dim()) else self.output
        return to_output(product, self.mesh, layout, wanted, self.use_local_output)


class Row(Layout):
    """A layer whose inputs are sharded: each rank has its part of the input, and the products are summed."""

    @cached_property
    def placements(self) -> tuple[Placement, Placement]:
        """How the weight and the bias are sharded: each of the layer's inputs is, and every rank has the whole bias."""
        return sharded(0 if self.transposed else 1, self.parts), Replicate()

    def local_part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the input: of each of the layer's inputs, side by side."""
        require_tensor(x)
        dims = x.dim()
        wanted = sharded(dims - 1, self.parts)
        given = wanted if same(self.input, LAST, dims) else self.input
        return to_local_input(x, self.mesh, given, lambda layout, x: same(layout, wanted, dims), wanted)[0]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return this layer's output."""
        local = self.local_part(x)
        weight = self.weight(module)
        bias = self.bias(module)
        if is_shard(self.output):
            dim = dim_of(self.output, local.dim())
            if dim > 0 and local.requires_grad:
                local = contiguous_gradient(local)
            if local.dim() == 1 and dim == 0:  # the op needs two dimensions
                product = matmul_reduce_scatter(local.unsqueeze(0), weight, "sum", 1, self.group).squeeze(0)
            else:
                product = matmul_reduce_scatter(local, weight, "sum", dim, self.group)
            if bias is not None:  # every rank adds it to its own rows, so its gradient is a sum over ranks
                (bias,) = summed_gradients(self.group, bias)
                if dim == local.dim() - 1:
                    bias = bias.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        elif self.output == Partial():
            product = local @ weight
            if bias is not None:  # the ranks' outputs are added later, so each adds its part of the bias
                (bias,) = summed_gradients(self.group, bias)
                bias = bias / self.mesh.size()
        else:
            product = matmul_to_replicated(local, weight, self.group)
        if bias is not None:
            product = product + bias.to(product.dtype)  # under autocast the two dtypes differ
        if self.output == Partial() and not self.use_local_output:  # of a local output, only the caller knows the use
            product = partial_sum(self.group, product)
        layout = self.output if is_shard(self.output) or self.output == Partial() else Replicate()
        return to_output(product, self.mesh, layout, self.output, self.use_local_output)


def column_parallel(x: Tensor, modules: Sequence[nn.Module]) -> list[Any]:
    """Return ``[module(x) for module in modules]`` for column-parallel linear layers, with one gather of ``x``.

    Equivalent, in plain PyTorch, to ``[linear(all_gather(x)) for linear in linears]``. Each rank has its part of every
    output.

    Args:
        x: the input of all modules, (..., in_features), in the input layout of the first module. If that is a shard,
            this rank's part. dtypes: float32, float64, bfloat16, float16.
        modules: `ColumnParallelLinear`, or linear layers with the style `ColwiseParallel`.

    Returns:
        The output of each module. Its hooks run, as in any call of it.

    Raises:
        TypeError: a module is not column-parallel. ValueError: the modules are on different meshes, or there is none.
    """
    layouts = [column_of(module) for module in modules]
    if not layouts:
        raise ValueError("column_parallel: modules is empty: pass at least one module")
    if any(layout.mesh != layouts[0].mesh for layout in layouts):
        raise ValueError("column_parallel: the modules are on different meshes: call it once for each mesh")
    local, layout = layouts[0].local_input(x)
    weights = [layout.weight(module) for layout, module in zip(layouts, modules, strict=True)]
    biases = [layout.bias(module) for layout, module in zip(layouts, modules, strict=True)]
    products = layouts[0].products(local, layout, weights, biases)
    offers = [Offer(module, x, product, False) for module, product in zip(modules, products, strict=True)]
    outputs: list[Any] = with_offers(offers, lambda: [module(x) for module in modules])  # so that their hooks run
    return outputs


def column_of(module: nn.Module) -> Column:
    """Return the layout of a column-parallel layer. Raises TypeError for any other module."""
    layout = getattr(module, "parallel", None)
    if not isinstance(layout, Column):
        raise TypeError(
            f"{type(module).__name__} is not column-parallel: use a ColumnParallelLinear, or apply the style "
            "ColwiseParallel of symm_overlap.nn"
        )
    return layout
