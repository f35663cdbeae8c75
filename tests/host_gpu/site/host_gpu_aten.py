"""torch's operators on CUDA tensors. The thread of the stream runs the operators for CPUs in the same memory.

As on a GPU, the caller continues at once, and only operators whose results the host needs wait for the stream.
Operators that only handle memory or views are torch's own.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import host_gpu_products
import torch
from host_gpu_streams import Place, enqueue, fail, is_cuda, synchronize
from torch.utils._pytree import tree_leaves, tree_map

WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "equal",
    "is_set_to",
    "masked_select",
    "nonzero",
    "unique_dim",
}
"""Operators that wait for the stream, also on a GPU: the shape of a result or the host's next step depends on data."""

UNCHANGED = {
    "_efficientzerotensor",
    "_nested_view_from_buffer",
    "_pin_memory",
    "_reshape_alias",
    "_resize_output_",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_strided",
    "is_pinned",
    "lift_fresh",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
}
"""Operators that launch no kernel."""

FOREIGN = ("_cuda", "_cudnn", "nested", "sparse", "symm_mem")
"""Parts of the names of operators that exist only for CUDA, or for kinds of tensors that this project does not use."""

_library = torch.library.Library("aten", "IMPL")


def places(arguments: Any) -> Any:
    """Replace each CUDA tensor in the arguments by its place. Call this at the time of the operator's call."""

    def place(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, torch.Generator):
            return next_numbers(x)
        return Place(x) if is_cuda(x) else x

    return tree_map(place, arguments)


def next_numbers(generator: torch.Generator) -> torch.Generator:
    """Return a generator for a CPU operator. Numbers differ from CUDA's, but the same seed gives the same numbers."""
    if torch._C._cuda_isCurrentStreamCapturing():
        raise NotImplementedError("host GPU: random numbers in a CUDA graph")
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets must be multiples of four
    return torch.Generator().manual_seed(hash((generator.initial_seed(), offset)) % 2**63)


def there(arguments: Any) -> Any:
    """Replace each place in the arguments by a CPU tensor at that place."""
    return tree_map(lambda x: x.tensor() if isinstance(x, Place) else x, arguments)


def without_data(arguments: Any) -> Any:
    """Replace the tensors in the arguments by tensors on the device "meta", which have no data."""

    def bare(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, torch.device):
            return torch.device("meta")
        return None if isinstance(x, torch.Generator) else x

    return tree_map(bare, arguments)


def for_cpu(operator: Any) -> Callable[..., Any]:
    """Return a function that computes an operator on CPU tensors: the operator itself, or torch's decomposition."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU"):
        return operator  # type: ignore[no-any-return]
    return torch._decomp.decomposition_table.get(operator, operator)


def on_cpu(operator: Any, arguments: Any, named: Any) -> Any:
    """Call an operator on CPU tensors, below autograd and below the modes of the original caller."""
    python = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(python):
        return for_cpu(operator)(*there(arguments), **there(named))


def resize_outputs(operator: Any, outputs: list[str], arguments: Any, named: Any) -> None:
    """Resize the tensors of ``out=`` to the shapes of the results, as an operator does when it is called."""
    bare = without_data(named)
    try:
        operator(*without_data(arguments), **bare)
    except NotImplementedError:
        return  # there is no meta kernel; if outputs have wrong shapes, the operator then fails on the stream
    for name in outputs:
        for shaped, output in zip(tree_leaves(bare[name]), tree_leaves(named[name]), strict=True):
            if output is not None and output.shape != shaped.shape:
                output.resize_(shaped.shape)


def seeded(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a random operator with the device's generator if the caller passes none."""
    if not any(a.name == "generator" and a.kwarg_only for a in operator._schema.arguments):
        return function

    def call(*arguments: Any, **named: Any) -> Any:
        if named.get("generator") is None:
            named["generator"] = torch.cuda.default_generators[torch._C._cuda_getDevice()]
        return function(*arguments, **named)

    return call


def waiting(operator: Any) -> Callable[..., Any]:
    """Return a replacement for an operator that waits for the stream."""

    def call(*arguments: Any, **named: Any) -> Any:
        synchronize()
        found = on_cpu(operator, places(arguments), places(named))
        return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, found)

    return call


def writing(operator: Any) -> Callable[..., Any]:
    """Return a replacement for an operator that writes into some of its arguments."""
    schema = operator._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    outputs = [a.name for a in schema.arguments if a.name in written and a.kwarg_only]

    def call(*arguments: Any, **named: Any) -> Any:
        if outputs:
            resize_outputs(operator, outputs, arguments, named)
        given, given_named = places(arguments), places(named)
        enqueue(lambda: on_cpu(operator, given, given_named))
        by_name = {**dict(zip((a.name for a in schema.arguments), arguments, strict=False)), **named}
        results = [by_name[name] for name in written]
        return None if not schema.returns else results[0] if len(schema.returns) == 1 else tuple(results)

    return call


def making(operator: Any) -> Callable[..., Any]:
    """Return a replacement for an operator that creates new tensors. Their shapes are known when it is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        device = torch.device("cuda", torch._C._cuda_getDevice())
        shapes = operator(*without_data(arguments), **without_data(named))
        made = tree_map(
            lambda x: (
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
                if isinstance(x, torch.Tensor)
                else x
            ),
            shapes,
        )
        given, given_named, targets = places(arguments), places(named), places(made)

        def work() -> None:
            found = on_cpu(operator, given, given_named)
            for target, source in zip(tree_leaves(there(targets)), tree_leaves(found), strict=True):
                if isinstance(target, torch.Tensor):
                    target.copy_(source)

        enqueue(work)
        return made

    return call


def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Replace ``copy_``. As on a GPU, the host waits for copies from and to its own memory unless it is pinned."""
    if self is source:
        return self
    source = source.expand(self.shape)
    of_host = [x for x in (self, source) if x.device.type == "cpu"]
    blocking = bool(of_host) and not (non_blocking and all(x.is_pinned() for x in of_host))
    if blocking and torch._C._cuda_isCurrentStreamCapturing():
        synchronize()  # raises the error of a forbidden call
    # If the host does not wait, no reference keeps its memory alive. The caller must do that.
    to, of = (x if blocking and x.device.type == "cpu" else Place(x) for x in (self, source))
    enqueue(lambda: on_cpu(torch.ops.aten.copy_.default, (to, of), {}))
    if blocking:
        synchronize()
    return self


def assert_later(condition: torch.Tensor, message: str = "") -> None:
    """Replace ``_assert_async``: if the condition is false, CUDA fails, and goes on to fail."""
    given = places(condition)
    enqueue(lambda: None if there(given) else fail())


def changed(operator: Any, name: str) -> Callable[..., Any] | None:
    """Return the replacement for an operator, or None if it is not replaced."""
    returns = operator._schema.returns
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if name in UNCHANGED or views or any(part in name for part in FOREIGN):
        return None
    if name in WAITING:
        return waiting(operator)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments)
    return seeded(operator, writing(operator) if writes else making(operator))


def change(torch_module: ModuleType) -> None:
    """Replace the kernels of torch after its import."""
    ctypes.CDLL(os.environ["SYMM_OVERLAP_HOST_GPU_KERNELS"])  # the project's own kernels
    # CPUs have no operator for CUDA's fused attention, but they have operators for each of its steps.
    torch._C._set_sdp_use_flash(False)
    torch._C._set_sdp_use_mem_efficient(False)
    torch._C._set_sdp_use_cudnn(False)
    torch_module.cuda.current_blas_handle = lambda: 0  # type: ignore[attr-defined]  # matmuls are torch's own for CPUs
    asserting = {"_assert_async": assert_later, "_assert_async.msg": assert_later}
    special = {"copy_": copy, **asserting, **host_gpu_products.SCALED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            namespace, _, name = full_name.partition("::")
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if namespace != "aten" or operator is None or name in special:
                continue
            if (function := changed(operator, packet)) is not None:
                _library.impl(name, function, "CUDA")
        for name, function in special.items():
            _library.impl(name, function, "CUDA")
