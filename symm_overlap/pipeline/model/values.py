"""Set the parameters and buffers of a stage. Those of a model that was built on the meta device get memory first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .stage_module import StageModule

Init = Callable[[nn.Module], Any]
Names = Mapping[str, Sequence[str]]
"""For the name of a tied parameter, all its names in the whole model."""


def materialize(
    stages: Sequence[StageModule],
    device: torch.device,
    init: Init | None,
    state_dict: Mapping[str, Tensor] | None,
    names: Names,
) -> None:
    """Allocate memory for everything on the meta device, and set values.

    Tied tensors stay tied. Values come from the state dict of the whole model, if there is one. Of the tensors that it
    does not contain, those that had no memory are set by ``init``, which is called with each module that has such a
    tensor of its own. The default is ``reset_parameters``, but with a state dict only for tensors that state dicts do
    not contain.

    Raises:
        ValueError: a tensor got no value, or a value of another shape. The message names it.
    """
    made: dict[int, Tensor] = {}
    for stage in stages:
        fresh: set[str] = set()
        for prefix, module in stage.named_modules():
            for name, tensor in _own(module):
                if tensor.is_meta:
                    fresh.add(f"{prefix}.{name}" if prefix else name)
                    _set(module, name, made.setdefault(id(tensor), _with_memory(tensor, device)))
        loaded = _load(stage, state_dict or {}, names)
        missing = fresh - loaded
        if state_dict is not None:
            _require_contained(set(stage.state_dict(keep_vars=True)) - loaded, state_dict, init)
        _initialize(stage, missing, init)
        _require_values(stage, missing, {id(tensor) for tensor in made.values()})
        if missing:  # init may have overwritten loaded tensors of the same module
            _load(stage, state_dict or {}, names)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that belong to a module itself, with their names."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor like one on the meta device, filled with a value that marks it as not set."""
    with torch.no_grad():
        fresh = torch.empty_like(tensor, device=device, requires_grad=False)
        if (unset := _unset(fresh)) is not None:
            _local(fresh).fill_(unset)
    if not isinstance(tensor, nn.Parameter):
        return fresh
    parameter = nn.Parameter(fresh, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _unset(tensor: Tensor) -> float | int | None:
    """Return the value that marks an element as not set, or None if all values of the dtype are usual ones."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return float("nan")
    return torch.iinfo(tensor.dtype).min or None if tensor.dtype != torch.bool else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a tensor by another one. A buffer stays persistent or non-persistent."""
    setattr(module, name, tensor)


def _load(stage: StageModule, state_dict: Mapping[str, Tensor], names: Names) -> set[str]:
    """Copy the tensors that the state dict contains. Return their names."""
    loaded = set()
    tensors = dict([*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)])
    for name, tensor in tensors.items() if state_dict else ():
        for key in (name, *names.get(name, ())):
            if key in state_dict:
                _copy(name, tensor, state_dict[key])
                loaded.add(name)
                break
    return loaded


def _copy(name: str, tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but shape {tuple(value.shape)} in the state dict")
    with torch.no_grad():
        tensor.copy_(sharded_as(tensor, value))


def sharded_as(own: Any, value: Any) -> Any:
    """Return a whole tensor as a DTensor that is sharded as a stage's own. Other values are returned as they are."""
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if isinstance(own, DTensor) and whole and own.shape == value.shape:  # otherwise load_state_dict names the parameter
        return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return value


def _require_contained(absent: set[str], state_dict: Mapping[str, Tensor], init: Init | None) -> None:
    """Notice names that differ: a model with random weights would train without an error."""
    if not absent:
        return
    some = f"{', '.join(sorted(absent)[:5])}{', ...' if len(absent) > 5 else ''}"
    text = f"state_dict= lacks {len(absent)} tensors of this rank: {some}"
    if init is None:
        raise ValueError(
            f"{text}. It has {', '.join(sorted(state_dict)[:5]) or 'nothing'}{', ...' if len(state_dict) > 5 else ''}. "
            "Give init= too, if these are to be initialised, or are to keep the values that they have"
        )
    warnings.warn(f"{text}. Those on the meta device are initialised by init, others keep their values", stacklevel=2)


def _initialize(stage: StageModule, missing: set[str], init: Init | None) -> None:
    for prefix, module in stage.named_modules():
        if any((f"{prefix}.{name}" if prefix else name) in missing for name, _ in _own(module)):
            if init is not None:
                with torch.no_grad():
                    init(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                with torch.no_grad():
                    reset()


def _has_value(tensor: Tensor, allocated: set[int]) -> bool:
    unset, local = _unset(tensor), _local(tensor)
    if unset is None:  # nothing has written to it
        return id(tensor) not in allocated or tensor._version > 0
    return not bool((local.isnan() if isinstance(unset, float) else local == unset).any())


def _require_values(stage: StageModule, missing: set[str], allocated: set[int]) -> None:
    for prefix, module in stage.named_modules():
        for name, tensor in _own(module):
            full = f"{prefix}.{name}" if prefix else name
            if full in missing and tensor.numel() and not _has_value(tensor, allocated):
                raise ValueError(
                    f"{full} ({type(module).__name__}) was on the meta device and has got no value: give init=, a "
                    "function that is called with each such module and sets its parameters and buffers, or a "
                    "state_dict= that contains it"
                )
