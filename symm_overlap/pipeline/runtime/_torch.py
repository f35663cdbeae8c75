"""The private APIs of torch that the runtime uses. Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

from torch.autograd.function import BackwardCFunction as PythonNode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["PythonNode", "tree_flatten", "tree_unflatten"]
