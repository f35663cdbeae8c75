"""The styles that lay out a module's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, parallel

from ..collective.arguments import group_name
from .forward import not_saved, override
from .layouts import as_dtensor, require_tensor, to_output
from .offer import with_offers
from .sharding import require_mesh
from .shared import Change, Inputs


class PrepareModuleInput(parallel.PrepareModuleInput):
    """Lay out a module's inputs as torch's `PrepareModuleInput` does, and share one gather among its linear layers.

    Equivalent, in plain PyTorch, to ``module(all_gather(x))``. torch gathers first and multiplies afterwards. Here the
    gather and the products of all ``linears`` are one all-gather-matmul.

    Args:
        linears: names of submodules that have the style `ColwiseParallel` and are called with the gathered input.
            Default: all children of the module that have this style and a replicated input. If some of these children
            are called with another input, name only the others, so that no product is computed in vain. ``()`` names
            none. A layer of another width or dtype than the input gets no product in any case.
        contiguous: whether the whole input is contiguous, as torch's is. If it is gathered along another dimension than
            the first and the module does not need it contiguous, False saves a copy.
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts, use_local_output: as in
            torch's style. Products are shared if exactly one tensor has the desired layout ``Replicate()``. It may be
            several of the inputs, as in ``attention(x, x)``.

    Raises:
        ValueError: ``linears`` is given and no input is gathered, it names a module that does not exist, or the mesh
            has several dimensions.
        TypeError: at the first call, if a named module is not column-parallel.
    """

    def __init__(self, *, linears: Sequence[str] | None = None, contiguous: bool = True, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.linears, self.contiguous = linears, contiguous
        positional, named = self._changes()
        changes = [*positional, *named.values()]
        whole = [found for found, wanted in changes if found is not None and isinstance(wanted, Replicate)]
        if linears and not whole:
            raise ValueError(
                f"PrepareModuleInput: linears {list(linears)} share a whole input, but no input has the desired layout "
                "Replicate"
            )
        if not whole:
            self.linears = ()

    def _changes(self) -> tuple[tuple[Change, ...], dict[str, Change]]:
        positional = zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True)
        wanted = self.desired_input_kwarg_layouts
        return tuple(positional), {name: (found, wanted.get(name)) for name, found in self.input_kwarg_layouts.items()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_mesh(device_mesh, "PrepareModuleInput")
        if hasattr(module, "prepared_input"):
            raise ValueError(f"PrepareModuleInput: {type(module).__name__} has this style already: apply it once")
        positional, named = self._changes()
        linears = None if self.linears is None else tuple(self.linears)
        for name in linears or ():
            _require_submodule(module, name)
        inputs = Inputs(
            device_mesh, group_name(device_mesh), positional, named, self.use_local_output, linears, self.contiguous
        )
        override(module, _forward, prepared_input=inputs, forward_of_prepared=module.forward)
        return module


class PrepareModuleOutput(parallel.PrepareModuleOutput):
    """Lay out a module's outputs as torch's `PrepareModuleOutput` does.

    Equivalent, in plain PyTorch, to ``redistribute(module(x))``. In eager mode, a local output with the layout
    ``Partial()`` is reduced through symmetric memory, by a reduce-scatter or an all-reduce. So a block whose branches
    end in `RowwiseParallel` with the output ``Partial()`` adds the branches and reduces their sum once.

    Args:
        output_layouts, desired_output_layouts, use_local_output: as in torch's style.

    Raises:
        ValueError: the mesh has several dimensions; at a call, the module has more or fewer outputs than the layouts,
            or an output is a DTensor on another mesh.
        TypeError: at a call, an output with a layout is not a tensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_mesh(device_mesh, "PrepareModuleOutput")
        changes = tuple(zip(self.output_layouts, self.desired_output_layouts, strict=True))
        module.register_forward_hook(_Outputs(device_mesh, changes, self.use_local_output))
        return module


@dataclass(frozen=True, eq=False)
class _Outputs:
    """The forward hook that lays out the outputs of a module."""

    mesh: DeviceMesh
    changes: tuple[Change, ...]
    use_local_output: bool

    def __deepcopy__(self, memo: Any) -> _Outputs:
        return self  # it never changes, and ranks are not copied with a model

    __reduce__ = not_saved

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Return the outputs in the layouts that the model wants: one, or a tuple."""
        each = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(each) != len(self.changes):
            raise ValueError(
                f"PrepareModuleOutput: {type(module).__name__} returned {len(each)} outputs, and the style has "
                f"{len(self.changes)} layouts: give one layout for each output, and None to one that stays as it is"
            )
        name = f"PrepareModuleOutput: an output of {type(module).__name__}"
        found = tuple(self._laid_out(name, output, *change) for output, change in zip(each, self.changes, strict=True))
        return found[0] if len(found) == 1 else found

    def _laid_out(self, name: str, output: Any, layout: Placement | None, wanted: Placement | None) -> Any:
        if layout is None or wanted is None:
            return output
        if isinstance(output, DTensor):
            whole = as_dtensor(output, self.mesh, layout, name).redistribute(placements=[wanted])
            return whole.to_local() if self.use_local_output else whole
        require_tensor(output, name)
        return to_output(output, self.mesh, layout, wanted, self.use_local_output)


class PrepareModuleInputOutput(parallel.PrepareModuleInputOutput):
    """Lay out a module's inputs as `PrepareModuleInput` does, and its outputs as `PrepareModuleOutput` does.

    Equivalent, in plain PyTorch, to ``redistribute(module(all_gather(x)))``, where the gather is shared by the linear
    layers of the module.

    Args:
        linears, contiguous: see `PrepareModuleInput`.
        use_local_input: whether the module gets local tensors as inputs, and not DTensors.
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts, output_layouts,
            desired_output_layouts, use_local_output: as in torch's style.

    Raises:
        ValueError, TypeError: see `PrepareModuleInput` and `PrepareModuleOutput`.
    """

    def __init__(
        self,
        *,
        linears: Sequence[str] | None = None,
        contiguous: bool = True,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
        **input_layouts: Any,
    ) -> None:
        super().__init__(
            use_local_input=use_local_input,
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
            **input_layouts,
        )
        self.prepare_module_input = PrepareModuleInput(
            linears=linears, contiguous=contiguous, use_local_output=use_local_input, **input_layouts
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    inputs: Inputs = module.prepared_input
    args, kwargs, offers = inputs.prepared(inputs.linears_of(module), args, kwargs)
    return with_offers(offers, lambda: module.forward_of_prepared(*args, **kwargs))


def _require_submodule(module: nn.Module, name: str) -> None:
    try:
        module.get_submodule(name)
    except AttributeError:
        has = ", ".join(child for child, _ in module.named_modules() if child)
        raise ValueError(
            f"PrepareModuleInput: linears names {name!r}, and {type(module).__name__} has no such module: it has {has}"
        ) from None
