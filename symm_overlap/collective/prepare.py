"""What a program may do around its calls: prepare them before the first one, and check whether one has failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from .._torch import TorchDispatchMode, compiling, has_no_data, lacking_data, tensors_without_data, tree_leaves
from ..runtime import TRAITS, backend_of
from ..settings import applied, current
from .dispatch.direct_call import KERNELS
from .exchange import Needs, raise_kernel_failures
from .module_state import ModuleState
from .uncompiled import uncompiled


@contextmanager
def prepare() -> Iterator[None]:
    """Set up everything that the calls in the block will need later: symmetric memory, kernels of the path "fused", the
    information that ranks exchange before their first calls, and on GPUs cuBLAS, for this thread and autograd's thread.
    Collective: every rank has the same calls in its block.

    Inside the block nothing is computed or sent. Tensors created there have a shape, a dtype and a device but no data,
    so the block needs neither time nor memory for them. Tensors from outside keep their values, and parameters keep
    their gradients. If a module keeps a tensor for its next run, in a buffer or an attribute, its old state is restored
    when the block ends. Other objects that keep tensors are not restored.

    Write the calls that come later, on tensors of the same shapes, or run the model forward and backward::

        with symm_overlap.prepare():
            x = torch.empty(1024, 8192, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            model(x).sum().backward()

    At the end of the block the ranks allocate memory on every lane that was used. Afterwards the same calls, and
    smaller ones, do not allocate symmetric memory, wait only for their own signals, and can be captured into CUDA
    graphs. Without `prepare`, ops allocate and grow their workspace when they need it. Kernels of the path "fused" are
    compiled and loaded for the same calls. Calls of other sizes may need other kernels, which Triton compiles at their
    first launch.

    Lanes, forced paths and forced chunks have the same effect as around calls. A function of `torch.compile` runs
    uncompiled in the block. An operation that reads values (``tensor.item()``) raises there.

    Raises:
        ValueError, TypeError: a call in the block has bad arguments.
        RuntimeError: there is not enough memory on this rank or on another; an earlier call on a lane failed; the block
            is inside another one, or in a compiled function; or, after everything has been set up, a module still holds
            tensors of the block, in a parameter or in a list that it has appended to.
        torch.distributed.DistBackendError: ranks need different sizes, or a peer is dead or did not arrive in time.
        Exception: Triton's own error if it cannot compile or load a kernel. All lanes have their memory by then.
    """
    settings = current()
    if settings.needs is not None:
        raise RuntimeError("symm_overlap.prepare() inside another symm_overlap.prepare(): write one block")
    if compiling():
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
    """Runs this package's ops through their own kernels, which see the arguments. torch would only compute shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree_leaves((args, kwargs)))
        if func._schema.is_mutable:  # torch would really write into a tensor from outside, such as a counter
            args, kwargs = lacking_data((args, kwargs))
        return KERNELS.get(func, func)(*args, **(kwargs or {}))

    def note(self, values: Iterable[Any]) -> None:
        """Keep the gradients of tensors.

        The dispatch mode does not see tensors that wrap others, such as DTensors. Their gradients are kept only if the
        tensors are parameters of modules.
        """
        for tensor in values:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # Asking a view whether it is a leaf takes a lock, which torch may be holding here.
                leaf = not tensor._is_view() and tensor.is_leaf
                self._gradients.setdefault(id(tensor), (tensor, tensor.grad if leaf else None))

    def restore_gradients(self) -> None:
        """Remove the gradients without data that a backward pass has left, and restore the earlier gradients."""
        for tensor, gradient in self._gradients.values():
            if tensor.is_leaf and has_no_data(tensor.grad):
                tensor.grad = gradient


def raise_failures() -> None:
    """Raise if a wait of an earlier call on a GPU has failed, as far as the host knows.

    A kernel cannot raise. If a wait exceeds its deadline, the kernel fills the outputs with NaN and leaves a record.
    The next call on the lane, or this function, turns the record into an exception. A failure that the GPU has not
    recorded yet is not visible: call ``torch.cuda.synchronize()`` first to check all calls. On CPU this function does
    nothing, because the call itself has raised.

    Raises:
        torch.distributed.DistBackendError: a wait has failed. The error names op, group, rank, peer, channel, and the
            expected and the found epoch. For a kernel of the path "fused" it names the chunk that the kernel waited for
            instead of the channel.
    """
    for kind in TRAITS:
        backend_of(kind).raise_failures()
    raise_kernel_failures()
