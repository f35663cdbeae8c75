"""What a linear layer computes whose weight is sharded by columns or by rows of ``x @ weight``.

========  =====================  =====================================  ====================================
layer     input, output          forward                                gradient of the input
========  =====================  =====================================  ====================================
column    Shard(d), Shard(-1)    all-gather-matmul along d              matmul-reduce-scatter
column    Replicate, Shard(-1)   matmul                                 matmul-all-reduce
row       Shard(-1), Shard(d)    matmul-reduce-scatter along d          all-gather-matmul
row       Shard(-1), Replicate   matmul-all-reduce                      matmul
========  =====================  =====================================  ====================================

Any other input or output is redistributed first or last, by DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ..collective import all_gather_matmul, matmul_reduce_scatter
from .gradients import gradient_laid_alike, matmul_to_replicated, replicated_matmuls, summed_gradients, transposed
from .layouts import dim_of, even_or_whole, is_shard, local_in, out, same
from .offer import offered
from .sharding import local_of, sharded

LAST = Shard(-1)

_Self = TypeVar("_Self")


@dataclass(frozen=True, eq=False)
class Layout:
    """How a parallel linear layer lies on the ranks, and its input and output.

    Attributes:
        mesh, group: the ranks, one dimension of them, and the name of their group.
        input, output: how the input (if it is no DTensor) and the output are laid out.
        use_local_output: whether the output is this rank's tensor, and not a DTensor.
        parts: of how many equal outputs, side by side, a column-parallel layer's output consists.
        transposed: whether the weight is kept as (in, out), as by ``Conv1D``, and not as (out, in).
        contiguous: whether a column-parallel layer's output is made contiguous. As it is computed, the dimension that
            is gathered comes first in memory.
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

    def weight(self, module: nn.Module) -> Tensor:
        """The module's weight on this rank, as the right-hand side of a matmul: (in, out)."""
        local = local_of(module.weight)
        return local if self.transposed else transposed(local)


class Column(Layout):
    """The weight's outputs are sharded: rank r computes its part of the output, from the whole input."""

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """This layer's output."""
        product = offered(module, x)
        if product is None:
            (product,) = self.products(*self.local_input(x), [self.weight(module)])
        return self.finish(module, product)

    def local_input(self, x: Tensor) -> tuple[Tensor, Placement]:
        """This rank's part of the input, and how it lies: a shard or the whole."""
        return local_in(x, self.mesh, self.input, even_or_whole, Replicate())

    def products(self, x: Tensor, layout: Placement, Bs: Sequence[Tensor]) -> list[Tensor]:
        """The product of the whole input and every one of ``Bs``, in one exchange."""
        if is_shard(layout):
            return all_gather_matmul(x, Bs, dim_of(layout, x.dim()), self.group, return_A=False)[1]
        return replicated_matmuls(x, Bs, self.group)

    def finish(self, module: nn.Module, product: Tensor) -> Tensor:
        """The output, of which the product is this rank's part without bias."""
        if self.contiguous:
            product = product.contiguous()
        if module.bias is not None:
            product = product + local_of(module.bias).to(product.dtype)
        layout = sharded(product.dim() - 1, self.parts)
        wanted = layout if same(self.output, LAST, product.dim()) else self.output
        return out(product, self.mesh, layout, wanted, self.use_local_output)


class Row(Layout):
    """The weight's inputs are sharded: each rank has its part of the input, and the products are summed."""

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """This layer's output."""
        local, _ = local_in(x, self.mesh, self.input, lambda layout, x: same(layout, LAST, x.dim()), LAST)
        weight = self.weight(module)
        bias = None if module.bias is None else local_of(module.bias)
        if is_shard(self.output):
            dim = dim_of(self.output, local.dim())
            if dim > 0 and local.requires_grad:
                local = gradient_laid_alike(local)
            product = matmul_reduce_scatter(local, weight, "sum", dim, self.group)
            if bias is not None:  # every rank adds it to its own rows, so its gradient is a sum over ranks
                (bias,) = summed_gradients(self.group, bias)
                if dim == local.dim() - 1:
                    bias = bias.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        else:
            product = matmul_to_replicated(local, weight, self.group)
        if bias is not None:
            product = product + bias.to(product.dtype)  # under autocast they differ
        layout = self.output if is_shard(self.output) else Replicate()
        return out(product, self.mesh, layout, self.output, self.use_local_output)


def column_parallel(x: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """``[module(x) for module in modules]`` of column-parallel linear layers, from one gather of ``x``.

    Equivalent, in plain PyTorch, to ``[linear(all_gather(x)) for linear in linears]``, of which each rank has its part
    of every output.

    Args:
        x: the input of all of them, laid out as the first module says.
        modules: `ColumnParallelLinear`, or linear layers with the style `ColwiseParallel`.

    Raises:
        TypeError: a module is not column-parallel. ValueError: they are on different ranks, or there is none.
    """
    layouts = [column_of(module) for module in modules]
    if not layouts:
        raise ValueError("column_parallel: give at least one module")
    if any(layout.mesh != layouts[0].mesh for layout in layouts):
        raise ValueError("column_parallel: the modules are on different meshes")
    local, layout = layouts[0].local_input(x)
    weights = [layout.weight(module) for layout, module in zip(layouts, modules, strict=True)]
    products = layouts[0].products(local, layout, weights)
    return [each.finish(module, y) for each, module, y in zip(layouts, modules, products, strict=True)]


def column_of(module: nn.Module) -> Column:
    """How a column-parallel layer lies on the ranks. Raises TypeError if it is none."""
    layout = getattr(module, "parallel", None)
    if not isinstance(layout, Column):
        raise TypeError(
            f"{type(module).__name__} is not column-parallel: make it a ColumnParallelLinear, or give it the style "
            "ColwiseParallel of symm_overlap.nn"
        )
    return layout
