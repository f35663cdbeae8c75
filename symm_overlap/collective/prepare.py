"""What a program may do around its calls: make all they need before the first one, and ask whether one has failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from .._torch import TorchDispatchMode, has_no_data, lacking_data, tensors_without_data, tree_leaves, uncompiled
from ..runtime import TRAITS, backend_of
from ..settings import applied, current
from .exchange import Needs, raise_kernel_failures
from .module_state import ModuleState
from .straight import KERNELS


@contextmanager
def prepare() -> Iterator[None]:
    """Make what the calls in the block will need, once, before they are made: symmetric memory, kernels of the path
    "fused", and whatever ranks have to tell each other at first. Collective: every rank has the same calls in its
    block.

    Inside the block nothing is computed and nothing travels. Tensors made there have a shape, a dtype and a device, and
    no data, so it costs neither time nor memory; tensors from outside keep their values, and parameters their
    gradients. A module that keeps a tensor for its next run, in a buffer or an attribute, has what it had before once
    the block ends; other objects that keep tensors are not looked at.

    Write the calls that come later, on tensors of the same shapes, or run the model forward and backward::

        with symm_overlap.prepare():
            x = torch.empty(1024, 8192, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            model(x).sum().backward()

    At its end the ranks make room on every lane that was used. The same calls, and smaller ones, then neither allocate
    symmetric memory nor wait for anything but their own signals, and can be captured into CUDA graphs. Without it, ops
    make and grow their workspace when they need it. Kernels of the path "fused" are compiled and loaded for the same
    calls; those of other sizes may need others, which Triton compiles at their first launch.

    Lanes, forced paths and chunks count as they do around calls. A function of `torch.compile` runs uncompiled in the
    block. What reads values (``tensor.item()``) raises there.

    Raises:
        ValueError, TypeError: a call in the block has bad arguments.
        RuntimeError: there is no room, on this rank or on another; an earlier call on a lane failed; the block is
            inside another one, or in a compiled function; or, when all is made, a module still holds tensors of the
            block, in a parameter or in a list that it has added to.
        torch.distributed.DistBackendError: ranks need different sizes, or a peer has died or did not come in time.
        Whatever Triton raises where it cannot compile or load a kernel. Every lane has its room then.
    """
    settings = current()
    if settings.needs is not None:
        raise RuntimeError("symm_overlap.prepare() inside another symm_overlap.prepare(): write one block")
    if torch.compiler.is_compiling():
        raise RuntimeError("symm_overlap.prepare() inside a compiled function: put it around the call")
    needs, noting, modules = Needs(), _Noting(), ModuleState()

    def before_module(module: Module, _: object) -> None:
        modules.keep(module)
        noting.note(module.parameters(recurse=False))

    hook = register_module_forward_pre_hook(before_module)
    try:
        with applied(replace(settings, needs=needs)), uncompiled(), tensors_without_data(), noting:
            yield
    finally:
        hook.remove()
        noting.restore_gradients()
        modules.restore()
    needs.make()
    modules.require_data()


class _Noting(TorchDispatchMode):
    """Lets the ops of this package see what they are called with, where torch would ask for shapes alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree_leaves((args, kwargs)))
        if func._schema.is_mutable:  # torch would really write into a tensor from outside, such as a count
            args, kwargs = lacking_data((args, kwargs))
        return KERNELS.get(func, func)(*args, **(kwargs or {}))

    def note(self, values: Iterable[Any]) -> None:
        """Keep the gradients that tensors have. Those that wrap others, such as a DTensor, only their module knows."""
        for tensor in values:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # To ask a view takes a lock, which torch may be holding here.
                leaf = not tensor._is_view() and tensor.is_leaf
                self._gradients.setdefault(id(tensor), (tensor, tensor.grad if leaf else None))

    def restore_gradients(self) -> None:
        """Undo what a backward pass has left: gradients without data."""
        for tensor, gradient in self._gradients.values():
            if tensor.is_leaf and has_no_data(tensor.grad):
                tensor.grad = gradient


def raise_failures() -> None:
    """Raise if a wait of an earlier call on a GPU has failed, as far as the host knows by now.

    A kernel cannot raise: a wait past its deadline fills the outputs with NaN and leaves a record, which the next call
    on the lane, or this, turns into an exception. ``torch.cuda.synchronize()`` first to know about all calls. On CPU
    the call itself has raised, and this does nothing.

    Raises:
        torch.distributed.DistBackendError: it names op, group, rank, peer, channel, and the expected and the found
            epoch; for a kernel of the path "fused", the chunk that it waited for in the place of the channel.
    """
    for kind in TRAITS:
        backend_of(kind).raise_failures()
    raise_kernel_failures()
