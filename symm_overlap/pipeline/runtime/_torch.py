"""The private APIs of torch that the runtime uses. Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

from torch.autograd.function import BackwardCFunction as PythonNode  # public, but not exported by torch.autograd
from torch.distributed.pipelining.microbatch import merge_chunks, split_args_kwargs_into_chunks
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["PythonNode", "merge_chunks", "split_args_kwargs_into_chunks", "tree_flatten", "tree_unflatten"]
