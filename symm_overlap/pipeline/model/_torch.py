"""The private APIs of torch that the front end uses. Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.

Fake tensors have shapes and dtypes but no memory. A dispatch mode sees every operator that runs under it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._functorch.predispatch import _add_batch_dim, _remove_batch_dim
from torch._functorch.predispatch import _vmap_decrement_nesting as end_vmap
from torch._functorch.predispatch import _vmap_increment_nesting as begin_vmap
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

__all__ = [
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "SET_GRADIENTS",
    "VMAP_VIEWS",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "HigherOrderOperator",
    "OpOverload",
    "TensorChunkSpec",
    "TorchDispatchMode",
    "TreeSpec",
    "allow_operators",
    "as_in_eager_mode",
    "begin_vmap",
    "depends_on_values",
    "detect_fake_mode",
    "end_vmap",
    "ending_vmaps",
    "forbid_operators",
    "ignoring_new_sizes",
    "keeping_modes",
    "keys_of",
    "keystr",
    "leaf_paths",
    "saved_tensors_hooks",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_unflatten",
    "without_function_modes",
]


VMAP_VIEWS = _add_batch_dim, _remove_batch_dim
"""They add the dimension of ``torch.vmap`` to a tensor, and remove it."""

SET_GRADIENTS = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
"""torch.export records calls of these, before it makes operators of the blocks that they begin and end."""


@contextmanager
def keeping_modes() -> Iterator[None]:
    """A context in which torch.export leaves the calls of the above in the graphs that this thread exports."""
    thread = threading.get_ident()
    passes = replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
    replaced = [(each, each.__name__.rsplit(".", 1)[-1]) for each in passes]
    originals = [getattr(module, name) for module, name in replaced]

    def kept_by(original: Any) -> Any:
        return lambda *args: args if threading.get_ident() == thread else original(*args)

    for (module, name), original in zip(replaced, originals, strict=True):
        setattr(module, name, kept_by(original))
    try:
        yield
    finally:
        for (module, name), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


def saved_tensors_hooks() -> Any:
    """Return the innermost active hooks for tensors that autograd saves, such as the hooks of a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def without_function_modes() -> AbstractContextManager[object]:
    """Return a context in which torch.export does not see which functions of torch are called, only their operators.
    It cannot record the autograd functions of DTensors.
    """
    return torch._C.DisableTorchFunction()


@contextmanager
def as_in_eager_mode(args: Any, kwargs: Any) -> Iterator[None]:
    """A context for the kernel of an operator on fake tensors. In it operators pass through autograd and through the
    transforms of ``torch.func`` again, which torch leaves out below an operator, and are not traced.
    """
    mode = detect_fake_mode((args, kwargs))
    assert mode is not None
    # torch's tracer replaces the call of modules. It would go on as if it were inside of a module that has raised.
    traced, nn.Module.__call__ = nn.Module.__call__, nn.Module._wrapped_call_impl  # type: ignore[method-assign]
    keys = torch._C._ForceDispatchKeyGuard(*_keys_of_a_new_thread())
    try:
        # The compiler compiles nothing under a mode, and raises if it was asked for one graph.
        with keys, _disable_current_modes(), mode, torch.compiler.set_stance("force_eager"):
            yield
    finally:
        nn.Module.__call__ = traced  # type: ignore[method-assign]


@cache
def _keys_of_a_new_thread() -> tuple[Any, Any]:
    """Return which of the dispatcher's keys a thread adds to those of tensors, and which it leaves out."""

    def keys() -> tuple[Any, Any]:
        return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(keys).result()


def ignoring_new_sizes(args: Any, kwargs: Any) -> AbstractContextManager[object]:
    """Return a context in which fake tensors may get sizes that depend on values, as rows that a mask selects. The
    tracer does not look for these sizes in the results of the operator that it traces.
    """
    mode = detect_fake_mode((args, kwargs))
    sizes = None if mode is None else mode.shape_env
    return nullcontext() if sizes is None else sizes.ignore_fresh_unbacked_symbols()


def depends_on_values(tensor: torch.Tensor) -> bool:
    """True if the size of a fake tensor depends on values."""
    return bool(free_unbacked_symbols(tensor))


def keys_of(spec: TreeSpec) -> Sequence[Any] | None:
    """Return the keys of a nested value, in its own order; None if it has none, as a tuple."""
    keys = spec.context[1] if spec.type is defaultdict else spec.context
    if not isinstance(keys, (list, tuple)) or len(keys) != spec.num_children:
        return None
    known = spec.type in (dict, OrderedDict, defaultdict) or all(isinstance(key, (str, int)) for key in keys)
    return keys if known else None


def leaf_paths(spec: TreeSpec, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return for each leaf of a nested value the keys, or the numbers in what has no keys, that lead to it."""
    if spec.is_leaf():
        return [path]
    children = zip(keys_of(spec) or range(spec.num_children), spec.children(), strict=True)
    return [found for name, child in children for found in leaf_paths(child, (*path, name))]


def forbid_operators(mode: FakeTensorMode, message: str) -> None:
    """From now on, let operators on the fake tensors of a mode raise a RuntimeError."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(message)

    mode.dispatch = refuse  # type: ignore[method-assign]


def allow_operators(mode: FakeTensorMode) -> None:
    """Undo `forbid_operators`."""
    vars(mode).pop("dispatch", None)


@contextmanager
def ending_vmaps() -> Iterator[None]:
    """A context in which an error ends the calls of ``torch.vmap`` that have begun in it."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        raise
