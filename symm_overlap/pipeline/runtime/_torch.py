"""The private APIs of torch that the runtime uses. Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

from typing import Any

from torch._functorch import config as functorch_config
from torch.autograd.function import BackwardCFunction as PythonNode
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["PythonNode", "donates", "is_reentrant_checkpoint", "tree_flatten", "tree_unflatten"]


def donates(node: Any) -> bool:
    """Whether a node of an autograd graph is a compiled function that may have donated what it saved to the memory
    plan of its backward pass. It then refuses to run where the graph is kept."""
    return (
        isinstance(node, PythonNode)
        and hasattr(getattr(node, "_forward_cls", None), "_aot_id")
        and bool(functorch_config.donated_buffer)
    )


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether a node is a checkpoint with ``use_reentrant=True``. It refuses to run where some gradients are left out,
    and has a graph of its own, which is not seen from outside."""
    return node.name() == "CheckpointFunctionBackward"
