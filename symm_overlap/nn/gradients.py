"""Matmuls between sharded tensors and tensors that are the same on every rank, which the ops do not provide.

torch's tensor parallelism has one rule for a replicated tensor: its gradient is replicated too. The gradient is whole
on every rank, and must not be summed over ranks again. (The ops follow `torch.distributed` instead, where the gradient
of an all-reduce is an all-reduce.) The rule means:

- If all ranks have an input and multiply it with their own columns, its gradient is all-reduced: a matmul-all-reduce.
- An all-reduced product passes its gradient on unchanged.
- If all ranks have a tensor and each uses it for its own part of the work, its gradient is the sum over ranks.

Each of these cases is one class here, with its own backward pass. A backward pass that is itself recorded, for second
derivatives, is made of the same cases: the rule holds for gradients of gradients too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._torch import compiling, untracked_views
from ..collective import all_reduce, matmul_all_reduce
from ..collective.biases import gradient
from ..collective.dispatch.autograd import factors_to_keep
from ..collective.ops.product import product
from ..custom_gradient import apply
from ..settings import applied, current, in_backward


def replicated_matmuls(x: Tensor, Bs: Sequence[Tensor], biases: Sequence[Tensor | None], group: str) -> list[Tensor]:
    """Return ``[x @ B + bias for B, bias in zip(Bs, biases)]``, where every rank has the same ``x``, and its own
    weights and biases.

    The gradient of ``x`` is one matmul-all-reduce for all products.
    """
    x, *others = _autocast(x, *Bs, *biases)
    Bs, biases, rows = others[: len(Bs)], others[len(Bs) :], x.reshape(-1, x.shape[-1])
    if _differentiable(rows, *others):
        products = apply(_ReplicatedMatmuls, group, rows, *others)
    else:
        products = [_product(rows, B, bias) for B, bias in zip(Bs, biases, strict=True)]
    return [each.view(*x.shape[:-1], each.shape[-1]) for each in products]


def matmul_to_replicated(x: Tensor, B: Tensor, group: str) -> Tensor:
    """Return ``all_reduce(x @ B)``. Its gradient is the same on every rank, so backward needs no communication."""
    x, B = _autocast(x, B)
    rows = x.reshape(-1, x.shape[-1])
    summed: Tensor = apply(_MatmulToReplicated, group, rows, B)
    return summed.view(*x.shape[:-1], summed.shape[-1])


def summed_gradients(group: str, *xs: Tensor) -> tuple[Tensor, ...]:
    """Return ``xs`` such that their gradients are summed over ranks. Every rank uses them for its own part of the work.

    One all-reduce sums all gradients, once the backward pass has computed the last of them.
    """
    if not _differentiable(*xs):
        return xs
    same: tuple[Tensor, ...] = apply(_SummedGradients, group, *xs)
    return same


def gradient_of_shard(gathered: Tensor, rank: int, world: int, dim: int, group: str) -> Tensor:
    """Return ``gathered`` such that each rank keeps only its own shard of the gradient, and zeros elsewhere.

    The gradient is the same on every rank, and the gradient of the gather is a reduce-scatter. So the reduce-scatter
    adds every shard once, and not once for each rank.
    """
    same: Tensor = apply(_GradientOfShard, rank, world, dim, group, gathered)
    return same


def partial_sum(group: str, x: Tensor) -> Tensor:
    """Return ``x``, which is this rank's part of a sum, such that second derivatives know that its gradient, that of
    the sum, is replicated.
    """
    same: Tensor = apply(_PartialSum, group, x)
    return same


def sum_to_replicated(group: str, x: Tensor) -> Tensor:
    """Return ``all_reduce(x)``. Its gradient is the same on every rank, so backward needs no communication."""
    summed: Tensor = apply(_SumToReplicated, group, x)
    return summed


def _differentiable(*xs: Tensor | None) -> bool:
    """True if autograd records a function of these tensors.

    The compiler (torch 2.13) traces a function of any number of tensors without its context if nothing is recorded.
    """
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in xs)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``, by the matmul that the back end chooses, or by the compiler's while compiling."""
    if not compiling():
        return product(a, b, bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _by_columns(B: Tensor) -> bool:
    """True if a matrix is stored column by column."""
    return B.t().is_contiguous()


def _gradient_of_right(x: Tensor, grad: Tensor, by_columns: bool) -> Tensor:
    """Return ``x.t() @ grad``, the gradient of the right-hand side, in the memory order of the right-hand side."""
    return _product(grad.t(), x).t() if by_columns else _product(x.t(), grad)


def _autocast(x: Tensor, *tensors: Any) -> list[Any]:
    """Cast the tensors, some of which may be None, as autocast casts the inputs of a matmul."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return [x, *tensors]
    dtype = torch.get_autocast_dtype(device)
    return [each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in (x, *tensors)]


def _in_settings_of_forward(backward: Any) -> Any:
    """Run a backward pass under the settings of its forward pass, as the ops do."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if compiling():
            return backward(ctx, *grads)
        with applied(in_backward(ctx.settings)):
            return backward(ctx, *grads)

    return run


def _recorded(*xs: Tensor | None) -> bool:
    """True if autograd records what a backward pass computes from these tensors. The compiler's backward is not."""
    return not compiling() and _differentiable(*xs)


def _for_own_part(ctx: Any, x: Tensor) -> Tensor:
    """Return a replicated tensor for a product that is this rank's own, in a backward pass."""
    if not _recorded(x):
        return x
    with applied(in_backward(ctx.settings)):
        return summed_gradients(ctx.group, x)[0]


def _keep_settings(ctx: Any) -> None:
    if not compiling():
        ctx.settings = current()


class _ReplicatedMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        _keep_settings(ctx)
        ctx.set_materialize_grads(False)
        ctx.group, ctx.backward_in_parts = group, True
        count = len(others) // 2
        Bs, biases = others[:count], others[count:]
        needs_x, *needs_Bs = ctx.needs_input_grad[1 : 2 + count]
        ctx.by_columns = [_by_columns(B) for B in Bs]
        ctx.save_for_backward(x if any(needs_Bs) else None, *(B if needs_x else None for B in Bs))
        return tuple(_product(x, B, bias) for B, bias in zip(Bs, biases, strict=True))

    @staticmethod
    @_in_settings_of_forward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *Bs = ctx.saved_tensors
        given = [(grad, B) for grad, B in zip(grads, Bs, strict=True) if grad is not None]
        grad_x = None
        if given and ctx.needs_input_grad[1]:
            # The sum of the products equals one product of the concatenated matrices, so one exchange is enough.
            (left, right), *others = ((grad, B.t()) for grad, B in given)
            if others:
                left = torch.cat([left, *(grad for grad, _ in others)], 1)
                right = torch.cat([right, *(B_t for _, B_t in others)])
            if _recorded(left, right):
                grad_x = apply(_MatmulToReplicated, ctx.group, left, right)
            else:
                grad_x = matmul_all_reduce(left, right, "sum", ctx.group)
        needs_others = ctx.needs_input_grad[2:]
        needs_Bs, needs_biases = needs_others[: len(Bs)], needs_others[len(Bs) :]
        if x is not None:
            x = _for_own_part(ctx, x)
        grad_Bs = [
            _gradient_of_right(x, grad, by_columns) if grad is not None and needed else None
            for grad, by_columns, needed in zip(grads, ctx.by_columns, needs_Bs, strict=True)
        ]
        return None, grad_x, *grad_Bs, *map(gradient, needs_biases, grads)


class _MatmulToReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor, B: Tensor) -> Tensor:
        _keep_settings(ctx)
        ctx.group, ctx.backward_in_parts = group, True
        ctx.by_columns = _by_columns(B)
        ctx.save_for_backward(*factors_to_keep(x, B))
        return matmul_all_reduce(x, B, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, B = ctx.saved_tensors
        grad = _for_own_part(ctx, grad)
        grad_x = _product(grad, B.t()) if ctx.needs_input_grad[1] else None
        grad_B = _gradient_of_right(x, grad, ctx.by_columns) if ctx.needs_input_grad[2] else None
        return None, grad_x, grad_B


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        _keep_settings(ctx)
        ctx.group = group
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @_in_settings_of_forward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        own = torch.cat([grad.flatten() for grad in grads])
        summed = apply(_SumToReplicated, ctx.group, own) if _recorded(own) else all_reduce(own, "sum", ctx.group)
        parts = summed.split([grad.numel() for grad in grads])
        # Copies: torch can neither deepcopy nor save a DTensor whose local part does not begin where its memory does.
        return None, *(part.view(grad.shape).to(grad.dtype, copy=True) for part, grad in zip(parts, grads, strict=True))


class _SumToReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor) -> Tensor:
        _keep_settings(ctx)
        ctx.group = group
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, _for_own_part(ctx, grad)


class _PartialSum(_SumToReplicated):  # summed later
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor) -> Tensor:
        _keep_settings(ctx)
        ctx.group = group
        return x.view_as(x)


class _GradientOfShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rank: int, world: int, dim: int, group: str, gathered: Tensor) -> Tensor:
        _keep_settings(ctx)
        ctx.rank, ctx.world, ctx.dim, ctx.group = rank, world, dim, group
        if compiling():  # it cannot trace `untracked_views`
            return gathered.view_as(gathered)
        with untracked_views():  # not a view for autograd, so the module may write to it
            return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = _for_own_part(ctx, grad)
        size = grad.shape[ctx.dim] // ctx.world
        own, first = torch.zeros_like(grad), ctx.rank * size
        own.narrow(ctx.dim, first, size).copy_(grad.narrow(ctx.dim, first, size))
        return None, None, None, None, own
