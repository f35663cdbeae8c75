"""The private APIs of FSDP2 that show which gradients it is about to reduce. Checked on torch 2.11.0, 2.13.0, 2.14.1
and 2.15.0."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["announce_gradients"]


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
    """Return the dtypes of the gradients that a group would reduce now. The set is empty if this is not known, because
    some gradients are made only then.
    """
    completes = hasattr(params, "_get_partial_reduce_grad") and params._partial_reduce_output is not None  # torch 2.15
    if completes or getattr(params, "reduce_scatter_unused_params", False):
        return set()
    found = set()
    for each in params.fsdp_params:
        if hasattr(each, "_unsharded_param"):
            accumulated = each.unsharded_accumulated_grad
            grad = each._unsharded_param.grad if accumulated is None else accumulated
            found |= set() if grad is None else {grad.dtype}
    return found
