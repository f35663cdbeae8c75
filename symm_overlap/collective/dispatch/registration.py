"""The torch library `symm_overlap`: how ops are registered with torch.

An op's file provides plain functions. This module adds what every op needs: the group for its name, autograd, autocast,
a key in the compiler's caches, and errors that a user can read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..._torch import add_to_cache_keys, below_autocast, resolve_group, untracked_views
from ...runtime import TRAITS, InMiddleOfCallError, NotCapturedError
from ...settings import applied, in_backward, of_call
from .._torch import keep_in_order
from ..exchange import Peers, Repeatable
from ..exchange.comparison import REJECTIONS, report_rejection
from .autograd import autograd_kernel
from .direct_call import KERNELS
from .note import settings_in

# A fragment: the C++ code defines ops in this namespace too.
library = torch.library.Library("symm_overlap", "FRAGMENT")

_OTHER_GRAPHS = (
    "The call is in a graph of torch.compile. If another rank compiled other graphs, for example because only that "
    "rank prints between a matmul and its collective, its collective is one of torch.distributed: compare "
    "symm_overlap.inductor.report() of the ranks."
)

calls = threading.local()
"""``calls.kernels``: how many kernels of ops this thread has entered."""


def define(
    name: str,
    signature: str,
    *,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    multiplies: bool = False,
    repeatable: bool = False,
    gathers: bool = False,
    flop: Callable[..., int] | None = None,
) -> None:
    """Define ``torch.ops.symm_overlap.<name>``, and its overload ``compiled``.

    The overload has one more argument, ``str note`` (`symm_overlap.collective.dispatch.note`), and no gradient. Graph
    passes that run after autograd write it into graphs. Such a pass has the groups' sizes in its own cache key.

    Args:
        signature: the schema without the name, with an argument ``str group_name``: ``"(Tensor A, ...) -> Tensor"``.
        eager: the implementation, on CPU and CUDA. Its first argument is the `Peers`, which replace the group's name.
        fake: returns outputs of the same sizes, strides and dtypes, without data; must accept symbolic sizes. Its first
            argument is the world size, which replaces the group's name.
        setup_context, backward: as for `torch.library.register_autograd`.
        multiplies: whether autocast treats the op as a matmul, and chooses its dtype as for ``torch.matmul``.
        repeatable: whether ``eager`` computes nothing besides one exchange, which writes all that is returned; see
            `symm_overlap.collective.exchange.repeated`.
        gathers: whether the first argument is gathered, so that peers may read it in place.
        flop: the op's work in FLOP, as for `torch.utils.flop_counter.register_flop_formula`.
    """
    qualified = f"symm_overlap::{name}"
    # An op promises the strides of its outputs and relies on those of its inputs: the compiler must not change them.
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    library.define(name + signature, tags=tags)
    arguments, output = signature.split(") -> ", 1)
    keyword_only = ", " if "*, " in arguments else ", *, "
    library.define(f"{name}.compiled{arguments}{keyword_only}str note) -> {output}", tags=tags)
    op = getattr(torch.ops.symm_overlap, name).default
    at = [argument.name for argument in op._schema.arguments].index("group_name")
    kernel = _kernel(name, eager, at, Repeatable(eager, gathers) if repeatable else None)
    KERNELS[op] = KERNELS[getattr(torch.ops.symm_overlap, name).compiled] = kernel
    for device in TRAITS:
        key = device.upper()
        library.impl(name, kernel, key)
        library.impl(f"{name}.compiled", kernel, key)
        if multiplies:
            library.impl(name, _autocast(op, device), f"Autocast{key}")
    library.impl(name, autograd_kernel(op, setup_context, backward), "Autograd", with_keyset=True)
    for one, size_of in ((op, size_in_graph), (getattr(torch.ops.symm_overlap, name).compiled, size_of_group)):
        torch.library.register_fake(one, _fake_kernel(one, fake, at, size_of), lib=library)
    torch.library.register_vmap(qualified, _no_vmap(name), lib=library)
    if flop is not None:
        _register_flop(op, flop)


def _kernel(op: str, eager: Callable[..., Any], at: int, repeatable: Repeatable | None) -> Callable[..., Any]:
    def run(*args: Any, note: str | None = None, key: bytes | None = None, **kwargs: Any) -> Any:
        if note is not None:
            try:
                with applied(in_backward(settings_in(note))) if note else nullcontext():
                    return run(*args, **kwargs)
            except dist.DistBackendError as error:
                error.args = (f"{error} {_OTHER_GRAPHS}",)
                raise
        calls.kernels = getattr(calls, "kernels", 0) + 1
        peers = Peers(args[at], of_call())
        try:
            with untracked_views():
                given = args[:at] + args[at + 1 :]
                if repeatable is not None:
                    return repeatable.call(peers, given, kwargs, key)
                return eager(peers, *given, **kwargs)
        except (InMiddleOfCallError, NotCapturedError) as error:
            peers.forget()
            raise for_users(error)  # noqa: B904 (the same exception)
        except Exception as error:
            if isinstance(error, REJECTIONS):
                report_rejection(op, peers, error)
            raise for_users(error)  # noqa: B904 (the same exception)

    return run


def _fake_kernel(op: Any, fake: Callable[..., Any], at: int, size_of: Callable[[str], int]) -> Callable[..., Any]:
    def run(*args: Any, note: str | None = None, **kwargs: Any) -> Any:
        keep_in_order(op)  # here, because every compiled call passes here, and loading the compiler is slow
        world = size_of(args[at])
        return fake(world, *args[:at], *args[at + 1 :], **kwargs)

    return run


def size_in_graph(name: str) -> int:
    """Return the size of a group, and make the graph that is being traced depend on it.

    The compiler's caches know a group only by its name. A graph compiled for another size must have another key.
    """
    world = resolve_group(name).size()
    add_to_cache_keys(name, world)
    return world


def size_of_group(name: str) -> int:
    """Return the number of ranks in a group."""
    return resolve_group(name).size()


def _no_vmap(op: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"symm_overlap.{op} cannot be vmapped, since every rank would have to make the same calls: add the batch "
            "dimension to the tensors, which may have any number of dimensions"
        )

    return refuse


def _register_flop(op: Any, flop: Callable[..., int]) -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(op.overloadpacket)(flop)


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    """Return the op with its tensors cast as autocast casts those of a matmul: every floating dtype except float64."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(item, dtype) for item in value]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            return value.to(dtype)
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with below_autocast():
            return op(*cast(args, dtype), **kwargs)

    return run


def for_users(error: Exception) -> Exception:
    """Return the error without the frames inside this package. SYMM_OVERLAP_FULL_TRACEBACK=1 keeps them."""
    if os.environ.get("SYMM_OVERLAP_FULL_TRACEBACK", "0") in ("", "0"):
        return error.with_traceback(None)
    return error
