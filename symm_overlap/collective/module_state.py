"""The state that modules keep from one run to the next. `prepare` restores it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from .._torch import has_no_data, tree_leaves


class _Kept(NamedTuple):
    """A module's state before it ran: everything except parameters and submodules."""

    module: Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]


class ModuleState:
    """Attributes and buffers of modules, as they were before the modules ran on tensors without data."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def keep(self, root: Module) -> None:
        """Keep the state of a module that is about to run, and of all modules in it. Modules that have run before are
        skipped.

        A module that already has tensors without data was created by the caller inside the block, and is skipped too.
        """
        if id(root) not in self._kept:
            for module in root.modules():
                if id(module) not in self._kept and not _without_data(module):
                    state = vars(module)
                    self._kept[id(module)] = _Kept(module, dict(state), dict(state["_buffers"]))

    def restore(self) -> None:
        """Restore the old state of modules that have tensors without data now.

        All of their state is restored, because counters and the like belong to the tensors that a module keeps. Only
        the training mode stays as the caller has set it.
        """
        for module, attributes, buffers in self._kept.values():
            if _without_data(module):
                state, training = vars(module), module.training
                state.clear()
                state.update(attributes, training=training)
                state["_buffers"].clear()
                state["_buffers"].update(buffers)

    def require_data(self) -> None:
        """Raise RuntimeError if modules still have tensors without data: in parameters, or in lists and other
        containers that they have added to.
        """
        left = [
            f"{type(module).__name__}.{name}" for module, _, _ in self._kept.values() for name in _without_data(module)
        ]
        if left:
            raise RuntimeError(
                f"symm_overlap.prepare(): modules have put tensors without data into {', '.join(left)}: take them out "
                "at the end of the block"
            )


def _without_data(module: Module) -> list[str]:
    """Return the names of attributes, parameters and buffers that are, or contain, tensors without data."""
    state = vars(module)
    parameters, buffers = state["_parameters"], state["_buffers"]
    others = {name: value for name, value in state.items() if value is not parameters and value is not buffers}
    return [
        name
        for name, value in {**others, **parameters, **buffers}.items()
        if any(has_no_data(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    ]
