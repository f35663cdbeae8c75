"""One gather for several linear layers, as the styles of prepare.py need it.

If a module has column-parallel children, such as attention with q, k and v, its input is gathered. The children's
products are computed in the same exchange, overlap with it, and are kept for the children::

    input shard -> all-gather-matmul -> whole input -> the module's own forward -> child(whole input)
                                     -> products of the children ------------------> the child's output

A child uses its product if and only if its input is exactly this tensor, it is its first call, and nothing that the
product depends on has changed (`symm_overlap.nn.offer`). Otherwise it computes from its actual input, as if nothing had
been prepared. So the module may do with its input what it likes, except differentiate by it. Products are dropped when
the module's forward ends, also by an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate

from .._torch import compiling
from ..collective import all_gather_matmul
from .gradients import gradient_of_shard, replicated_matmuls
from .layouts import as_dtensor, dim_of, even_or_whole, is_shard, moved, require_tensor, same
from .linear import Column, column_of
from .offer import Offer

Change = tuple[Placement | None, Placement | None]
"""The layout of an input, and the layout that the module wants. None means that the input stays as it is."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Prepares the inputs of one module, see `PrepareModuleInput`."""

    mesh: DeviceMesh
    group: str
    positional: tuple[Change, ...]
    named: dict[str, Change]
    use_local_output: bool
    linears: tuple[str, ...] | None
    contiguous: bool

    def __deepcopy__(self, memo: Any) -> Inputs:
        return self  # it never changes, and ranks are not copied with a model

    def linears_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the layers whose products are computed with the gather.

        FSDP gathers the weights of a module, and reduces their gradients, around the module's own forward and backward
        passes. A product outside of these would miss both, so layers in modules of FSDP inside this one get none.
        """
        if self.linears is None:
            layers = [child for child in module.children() if isinstance(getattr(child, "parallel", None), Column)]
            paths = [[layer] for layer in layers if isinstance(column_of(layer).input, Replicate)]
        else:
            paths = [_path(module, name) for name in self.linears]
        outside = [path for path in paths if not any(isinstance(each, FSDPModule) for each in path)]
        return [path[-1] for path in outside if self._ready(path[-1])]

    def _ready(self, module: nn.Module) -> bool:
        """True if the weight is available, and counts how often it is written to. A weight that is computed with each
        call (by a parametrization, or a hook) would be another one when the layer runs.
        """
        if any(name not in module._parameters for name in ("weight", "bias")):
            return False
        mesh, weight = column_of(module).mesh, module.weight
        if mesh != self.mesh or not isinstance(weight, DTensor) or weight.device_mesh != mesh:
            return False
        return compiling() or not weight.is_inference()

    def prepared(
        self, linears: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Offer]]:
        """Return the inputs in the layouts that the module wants, and the products of ``linears`` if they share one.

        A tensor that is several inputs, as in ``attention(x, x)``, is prepared once.
        """
        if self.positional and len(args) != len(self.positional):
            raise ValueError(
                "module inputs and input_layouts should have same length! "  # torch's words
                f"The module got {len(args)} positional inputs, but input_layouts describes {len(self.positional)}: "
                "name the others in input_kwarg_layouts, or use None for inputs that stay as they are"
            )
        nothing: Change = (None, None)
        positional = [*zip(args, self.positional or repeat(nothing), strict=False)]
        named = {name: (x, self.named.get(name, nothing)) for name, x in kwargs.items()}
        different: list[tuple[Any, Change]] = []
        for x, change in (*positional, *named.values()):
            if not any(x is other and change == its for other, its in different):
                different.append((x, change))
        if sum(found is not None and isinstance(wanted, Replicate) for _, (found, wanted) in different) > 1:
            linears = ()  # nobody knows which of the inputs they are called with
        offers: list[Offer] = []
        prepared = [(x, change, self._one(linears, offers, x, *change)) for x, change in different]

        def of(x: Any, change: Change) -> Any:
            return next(result for other, its, result in prepared if other is x and its == change)

        return tuple(of(*each) for each in positional), {name: of(*each) for name, each in named.items()}, offers

    def _one(
        self,
        linears: Sequence[nn.Module],
        offers: list[Offer],
        x: Any,
        layout: Placement | None,
        wanted: Placement | None,
    ) -> Any:
        if layout is None:
            return x
        require_tensor(x)
        given = isinstance(x, DTensor)
        found = x.placements[0] if given else layout
        # Sharing an input that is whole already saves exchanges in the backward pass only.
        saves = is_shard(found) or torch.is_grad_enabled()
        sharing: list[nn.Module] = []
        if saves and isinstance(wanted, Replicate) and even_or_whole(found, x):
            sharing = [linear for linear in linears if _accepts(linear, x, found)]
        if sharing:
            whole, products = self._shared(sharing, x, found)
            offers += [Offer(*each, is_shard(found)) for each in zip(sharing, repeat(whole), products)]
            return whole
        wanted = found if wanted is None else wanted
        stays = same(found, wanted, x.dim())
        if stays and given is not self.use_local_output:
            return x
        if not given and self.use_local_output:
            return moved(x, self.mesh, layout, wanted)
        whole = as_dtensor(x, self.mesh, layout)
        if not stays:
            whole = whole.redistribute(placements=[wanted])
        return whole.to_local() if self.use_local_output else whole

    def _shared(self, linears: Sequence[nn.Module], x: Tensor, layout: Placement) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the whole input, and its products for ``linears``."""
        local = x.to_local() if isinstance(x, DTensor) else x
        weights = [column_of(linear).weight(linear) for linear in linears]
        biases = [column_of(linear).bias(linear) for linear in linears]
        with _counting_writes():
            if is_shard(layout):
                dim = dim_of(layout, x.dim())
                # The shard is saved for the backward pass, so the module may write to the whole tensor.
                gathered, products = all_gather_matmul(
                    local, weights, dim, self.group, return_A=True, save="shard", biases=biases
                )
                assert gathered is not None
                if self.contiguous:
                    gathered = gathered.contiguous()
                # Autocast casts what is gathered. The module's input keeps its dtype, as with torch's style.
                gathered = gathered.to(local.dtype)
                whole = gradient_of_shard(gathered, self.mesh.get_local_rank(), self.mesh.size(), dim, self.group)
            else:
                whole = local
                products = replicated_matmuls(local, weights, biases, self.group)
            if not self.use_local_output:
                whole = as_dtensor(whole, self.mesh, Replicate())
        return whole, products


def _path(module: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules from ``module`` down to its submodule ``name``, without ``module`` itself."""
    parts = name.split(".")
    return [module.get_submodule(".".join(parts[: depth + 1])) for depth in range(len(parts))]


def _accepts(linear: nn.Module, x: Tensor, layout: Placement) -> bool:
    """True if the layer can be called with the whole of ``x``. If not, the module calls it with another tensor."""
    column: Column = column_of(linear)
    weight: Any = linear.weight
    if is_shard(layout) and x.dim() < 2:
        return False
    features = x.shape[-1]
    if is_shard(layout) and not isinstance(x, DTensor) and dim_of(layout, x.dim()) == x.dim() - 1:
        features = features * column.mesh.size()
    casts = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    same_dtype = x.dtype == weight.dtype or (casts and x.is_floating_point())
    return bool(same_dtype and features == weight.shape[0 if column.transposed else 1])


@contextmanager
def _counting_writes() -> Iterator[None]:
    """Let tensors inside the block count how often they are written to. Tensors of inference mode do not count."""
    if compiling() or not torch.is_inference_mode_enabled():
        yield
    else:
        with torch.inference_mode(False), torch.no_grad():
            yield
