"""What the ops do not have: matmuls between tensors that are sharded and tensors that are the same on every rank.

torch's tensor parallelism keeps one rule for a replicated tensor: its gradient is replicated too. It is whole on every
rank, and must not be summed over ranks again. (The ops follow `torch.distributed` instead, where the gradient of an
all-reduce is an all-reduce.) With that rule

- an input that all ranks have, multiplied with each rank's columns, has the all-reduced gradient: a matmul-all-reduce;
- an all-reduced product passes its gradient on as it is;
- a tensor that all ranks have, and each uses for its own part of the work, has the sum of the ranks' gradients.

Each of them is one class here, and all that is written for its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch import untracked_views
from ..collective import all_reduce, matmul_all_reduce
from ..collective.autograd import factors_to_keep
from ..collective.ops.product import product
from ..settings import applied, current, in_backward


def replicated_matmuls(x: Tensor, Bs: Sequence[Tensor], group: str) -> list[Tensor]:
    """``[x @ B for B in Bs]`` of an ``x`` that every rank has, and of every rank's own ``Bs``.

    The gradient of ``x`` is one matmul-all-reduce for all products.
    """
    x, *Bs = _autocast(x, *Bs)
    rows = x.reshape(-1, x.shape[-1])
    products = _ReplicatedMatmuls.apply(group, rows, *Bs)  # type: ignore[no-untyped-call]
    return [each.view(*x.shape[:-1], each.shape[-1]) for each in products]


def matmul_to_replicated(x: Tensor, B: Tensor, group: str) -> Tensor:
    """``all_reduce(x @ B)``, whose gradient is the same on every rank and goes on without communication."""
    x, B = _autocast(x, B)
    rows = x.reshape(-1, x.shape[-1])
    summed: Tensor = _MatmulToReplicated.apply(group, rows, B)  # type: ignore[no-untyped-call]
    return summed.view(*x.shape[:-1], summed.shape[-1])


def summed_gradients(group: str, *xs: Tensor) -> tuple[Tensor, ...]:
    """``xs``, which every rank has and uses for its own part of the work: their gradients are summed over ranks.

    One all-reduce sums all of them, when the backward pass has come to the last.
    """
    same: tuple[Tensor, ...] = _SummedGradients.apply(group, *xs)  # type: ignore[no-untyped-call]
    return same


def gradient_of_shard(gathered: Tensor, rank: int, world: int, dim: int) -> Tensor:
    """``gathered``, of whose gradient, which is the same on every rank, each rank keeps its own shard.

    Every shard then arrives once at the reduce-scatter that is the gradient of a gather.
    """
    same: Tensor = _GradientOfShard.apply(rank, world, dim, gathered)  # type: ignore[no-untyped-call]
    return same


def transposed(weight: Tensor) -> Tensor:
    """``weight.t()``, whose gradient comes back in the order in which the weight lies in memory.

    Ops make the gradient of a right-hand side row by row. To add that to the gradients of earlier passes, element by
    element in another order, takes more than twice the time.
    """
    right: Tensor = _Transposed.apply(weight)  # type: ignore[no-untyped-call]
    return right


def gradient_laid_alike(x: Tensor) -> Tensor:
    """``x``, whose gradient is contiguous if ``x`` is: a function of the model's own may rely on it, as with torch."""
    same: Tensor = _GradientLaidAlike.apply(x)  # type: ignore[no-untyped-call]
    return same


def read_only(x: Tensor) -> Tensor:
    """``x``, to which nobody can write: torch raises for a view that a function with its own gradient has made."""
    same: Tensor = _ReadOnly.apply(x)  # type: ignore[no-untyped-call]
    return same


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, by the matmul that the back end chooses, or by the compiler's."""
    return a @ b if torch.compiler.is_compiling() else product(a, b)


def _by_columns(B: Tensor) -> bool:
    """Whether a matrix lies in memory column by column."""
    return B.t().is_contiguous()


def _gradient_of_right(x: Tensor, grad: Tensor, by_columns: bool) -> Tensor:
    """``x.t() @ grad``, the gradient of the right-hand side, in the order in which that lies in memory."""
    return _product(grad.t(), x).t() if by_columns else _product(x.t(), grad)


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as autocast casts those of a matmul."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def _in_settings_of_forward(backward: Any) -> Any:
    """A backward pass, differentiated once, under the settings of its forward pass, as the ops' own are."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with applied(in_backward(ctx.settings)):
            return backward(ctx, *grads)

    return once_differentiable(run)


def _keep_settings(ctx: Any) -> None:
    if not torch.compiler.is_compiling():
        ctx.settings = current()


class _ReplicatedMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor, *Bs: Tensor) -> tuple[Tensor, ...]:
        _keep_settings(ctx)
        ctx.set_materialize_grads(False)
        ctx.group, ctx.backward_in_parts = group, True
        needs_x, *needs_Bs = ctx.needs_input_grad[1:]
        ctx.by_columns = [_by_columns(B) for B in Bs]
        ctx.save_for_backward(x if any(needs_Bs) else None, *(B if needs_x else None for B in Bs))
        return tuple(_product(x, B) for B in Bs)

    @staticmethod
    @_in_settings_of_forward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *Bs = ctx.saved_tensors
        given = [(grad, B) for grad, B in zip(grads, Bs, strict=True) if grad is not None]
        grad_x = None
        if given and ctx.needs_input_grad[1]:
            # The sum of the products is one product of the matrices side by side, and so one exchange.
            (left, right), *others = ((grad, B.t()) for grad, B in given)
            if others:
                left = torch.cat([left, *(grad for grad, _ in others)], 1)
                right = torch.cat([right, *(B_t for _, B_t in others)])
            grad_x = matmul_all_reduce(left, right, "sum", ctx.group)
        grad_Bs = [
            _gradient_of_right(x, grad, by_columns) if grad is not None and needed else None
            for grad, by_columns, needed in zip(grads, ctx.by_columns, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, grad_x, *grad_Bs


class _MatmulToReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor, B: Tensor) -> Tensor:
        ctx.backward_in_parts = True
        ctx.by_columns = _by_columns(B)
        ctx.save_for_backward(*factors_to_keep(x, B))
        return matmul_all_reduce(x, B, "sum", group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, B = ctx.saved_tensors
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
        summed = all_reduce(torch.cat([grad.flatten() for grad in grads]), "sum", ctx.group)
        parts = summed.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))


class _GradientOfShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rank: int, world: int, dim: int, gathered: Tensor) -> Tensor:
        ctx.rank, ctx.world, ctx.dim = rank, world, dim
        if torch.compiler.is_compiling():  # which counts no writes, so that there must be none: see `read_only`
            return gathered.view_as(gathered)
        with untracked_views():  # no view for autograd, so that it may be written to
            return gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        size = grad.shape[ctx.dim] // ctx.world
        own, first = torch.zeros_like(grad), ctx.rank * size
        own.narrow(ctx.dim, first, size).copy_(grad.narrow(ctx.dim, first, size))
        return None, None, None, own


class _GradientLaidAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.contiguous = x.is_contiguous()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous() if ctx.contiguous else grad


class _ReadOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # a layer that was not called has no gradient, and not zeros
        return weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.t().contiguous()
