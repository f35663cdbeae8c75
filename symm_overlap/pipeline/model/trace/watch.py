"""Watch what the operators of a module do while it runs on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._torch import OpOverload, TorchDispatchMode, tree_flatten
from .foreign import leaves_of
from .writes import arguments


class Watch(TorchDispatchMode):
    """Notes what operators do: whether they draw random numbers, which memory they write to, and which parameters they
    use.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.written: set[Any] = set()
        self.parameters: list[nn.Parameter] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.parameters += [leaf for leaf in leaves_of(args, kwargs or {}) if isinstance(leaf, nn.Parameter)]
        if isinstance(func, OpOverload):
            self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
            changed = [value for value, _, writes in arguments(func, args, kwargs or {}) if writes]
            self.written.update(memory_of(leaf) for leaf in tree_flatten(changed)[0] if isinstance(leaf, Tensor))
        else:
            self.random = True  # an operator of higher order, whose graphs may draw
        return func(*args, **(kwargs or {}))


def memory_of(tensor: Tensor) -> Any:
    """Return a key for the memory of a tensor."""
    return tensor.untyped_storage()._cdata
