"""The private APIs of FSDP2 that show how much is sent, and which gradients are about to be reduced. Checked on torch
2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import torch

from ...collective.sum_dtypes import sent_in

__all__ = ["announce_gradients", "bytes_of", "reduce_dtypes"]


def bytes_of(params: Any, halves: bool) -> tuple[int, int]:
    """Return the bytes of a gather's output and of a reduce-scatter's input, as far as known before the first one.

    Parameters with an extension (``fsdp_pre_all_gather``) may turn out to need more.

    Args:
        halves: whether gradients in half precision are sent as they are if that is possible.
    """
    halves = halves and not _completes_gradients(params)
    world = params.mesh_info.shard_mesh_size
    gathered = reduced = itemsize = 0
    for each in params.fsdp_params:
        numel, dtype, reduce_dtype = world * prod(each.padded_sharded_param_size), *_dtypes_of(each)
        gathered += numel * dtype.itemsize
        if each.sharded_param.requires_grad:
            sent = sent_in(dtype, reduce_dtype) if halves else reduce_dtype
            reduced, itemsize = reduced + numel, max(itemsize, sent.itemsize)
    return gathered, reduced * itemsize  # one dtype for all gradients


def reduce_dtypes(params: Any) -> set[torch.dtype]:
    """Return the dtypes in which gradients are reduced."""
    return {_dtypes_of(each)[1] for each in params.fsdp_params if each.sharded_param.requires_grad}


def _dtypes_of(param: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which a parameter is gathered and its gradient is reduced."""
    policy, own = param.mp_policy, param.sharded_param.dtype  # since torch 2.15, each parameter may have its own policy
    dtype = policy.param_dtype if policy.param_dtype is not None and own.is_floating_point else own
    # Without a dtype for reductions, torch 2.15 reduces in the dtype in which gradients accumulate.
    return dtype, policy.reduce_dtype or getattr(param, "sharded_grad_dtype", None) or dtype


def announce_gradients(params: Any) -> None:
    """Before a parameter group reduces its gradients, let it call ``expect(dtypes, reduces)`` of its custom
    reduce-scatter, if that has such a method.

    FSDP2 calls ``post_backward`` of every group in every backward pass, also if the group took no part in it. The
    method takes the gradients from the parameters, and only then asks the reduce-scatter for memory.
    """
    inner = vars(params).get("post_backward")
    if getattr(inner, "announces_gradients", False):
        return  # an earlier call did it
    group = weakref.ref(params)  # the group owns the function

    def post_backward(*unused: Any) -> Any:
        params = group()
        assert params is not None
        expect = getattr(params._reduce_scatter_comm, "expect", None)
        if expect is not None:
            expect(_dtypes(params), bool(params.reduce_grads))
        return inner(*unused) if inner is not None else type(params).post_backward(params, *unused)

    post_backward.announces_gradients = True  # type: ignore[attr-defined]
    params.post_backward = post_backward


def _dtypes(params: Any) -> set[torch.dtype]:
    """Return the dtypes of the gradients that a group would reduce now. The set is empty if they may be others, or
    others on other ranks.
    """
    # Torch 2.15 also makes zeros for what an earlier backward pass has reduced, but not over all ranks.
    partial = hasattr(params, "_get_partial_reduce_grad") and params._partial_reduce_output is not None
    # If parameters stay gathered, a rank may run more backward passes than others before they reduce.
    if partial or _completes_gradients(params) or not params.reshard_after_backward:
        return set()
    found = set()
    for each in params.fsdp_params:
        if hasattr(each, "_unsharded_param"):
            accumulated = each.unsharded_accumulated_grad
            grad = each._unsharded_param.grad if accumulated is None else accumulated
            found |= set() if grad is None else {grad.dtype}
    return found


def _completes_gradients(params: Any) -> bool:
    """True if zeros are reduced for parameters without a gradient. Since torch 2.15, they may have another dtype."""
    return bool(getattr(params, "reduce_scatter_unused_params", False))
