"""Calls that must fail, with the errors that they must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import symm_overlap

ops = torch.ops.symm_overlap


@dataclass(frozen=True)
class Bad:
    """A call that must fail, the type of its error, and words that the message must contain."""

    op: str
    call: Callable[[str], object]
    error: type[Exception]
    says: tuple[str, ...]


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def h(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.bfloat16)


def gather(A: Tensor, Bs: list[Tensor], dim: int = 0, *biases: Tensor) -> Callable[[str], object]:
    return lambda name: ops.fused_all_gather_matmul(A, Bs, dim, name, list(biases) or None)


def scatter(A: Tensor, B: Tensor, op: str = "sum", dim: int = 0, *bias: Tensor) -> Callable[[str], object]:
    return lambda name: ops.fused_matmul_reduce_scatter(A, B, op, dim, name, *bias)


def reduce(A: Tensor, B: Tensor, op: str = "sum", *bias: Tensor) -> Callable[[str], object]:
    return lambda name: ops.fused_matmul_all_reduce(A, B, op, name, *bias)


DTYPE = "torch.float32, torch.float64, torch.bfloat16, torch.float16"
f64, i32 = torch.float64, torch.int32

# All calls are for two ranks. A message must show sizes as the caller wrote them.
BAD = {
    # fused_all_gather_matmul
    "AG no weights": Bad("ag", gather(t(4, 3), []), ValueError, ("Bs is empty",)),
    "AG shard 1-D": Bad("ag", gather(t(3), [t(3, 5)]), ValueError, ("A_shard", "(3,)", "at least 2 dimensions")),
    "AG weight 1-D": Bad("ag", gather(t(4, 3), [t(3)]), ValueError, ("Bs[0]", "(3,)", "matrix")),
    "AG weight 3-D": Bad("ag", gather(t(4, 3), [t(3, 5), t(1, 3, 5)]), ValueError, ("Bs[1]", "(1, 3, 5)", "matrix")),
    "AG rows": Bad(
        "ag", gather(t(4, 3), [t(3, 5), t(7, 5)]), ValueError, ("Bs[1]", "(7, 5)", "(4, 3)", "needs 3 rows")
    ),
    "AG rows, last dimension": Bad(
        "ag", gather(t(4, 3), [t(3, 5)], 1), ValueError, ("(3, 5)", "(4, 3)", "needs 6 rows")
    ),
    "AG dimension too high": Bad(
        "ag", gather(t(4, 3), [t(3, 5)], 2), ValueError, ("gather_dim is 2", "(4, 3)", "-2 to 1")
    ),
    "AG dimension too low": Bad(
        "ag", gather(t(4, 3), [t(3, 5)], -3), ValueError, ("gather_dim is -3", "(4, 3)", "-2 to 1")
    ),
    "AG int dtype": Bad(
        "ag", gather(t(4, 3, dtype=i32), [t(3, 5, dtype=i32)]), TypeError, ("A_shard is torch.int32", DTYPE)
    ),
    "AG two dtypes": Bad(
        "ag", gather(t(4, 3), [t(3, 5, dtype=f64)]), TypeError, ("Bs[0] is torch.float64", "torch.float32")
    ),
    "AG two devices": Bad("ag", gather(t(4, 3), [t(3, 5, device="meta")]), TypeError, ("Bs[0] is on meta", "on cpu")),
    "AG group": Bad("ag", lambda _: gather(t(4, 3), [t(3, 5)])("nobody"), ValueError, ("no process group", "'nobody'")),
    "AG save": Bad(
        "ag",
        lambda name: symm_overlap.all_gather_matmul(t(4, 3), [t(3, 5)], 0, name, save="all"),
        ValueError,
        ("'all'", "'gathered' and 'shard'"),
    ),
    "AG wrapper dimension": Bad(
        "ag",
        lambda name: symm_overlap.all_gather_matmul(t(4, 3), [t(3, 5)], 2, name),
        ValueError,
        ("gather_dim is 2", "(4, 3)"),
    ),
    "AG biases": Bad(
        "ag",
        gather(t(4, 3), [t(3, 5), t(3, 2)], 0, t(0), t(5)),
        ValueError,
        ("biases[1] of shape (5,)", "the 2 columns of Bs[1]"),
    ),
    "AG biases of another dtype": Bad(
        "ag", gather(t(4, 3), [t(3, 5)], 0, t(5, dtype=f64)), TypeError, ("biases[0] is torch.float64", "A_shard is")
    ),
    "AG too few biases": Bad("ag", gather(t(4, 3), [t(3, 5), t(3, 2)], 0, t(5)), ValueError, ("biases has 1", "has 2")),
    # fused_matmul_reduce_scatter
    "RS 1-D": Bad("rs", scatter(t(3), t(3, 5)), ValueError, ("A of shape (3,)", "at least 2 dimensions")),
    "RS 0-D": Bad("rs", scatter(t(), t(3, 5)), ValueError, ("A of shape ()", "at least 2 dimensions")),
    "RS weight": Bad("rs", scatter(t(4, 3), t(1, 3, 5)), ValueError, ("B of shape (1, 3, 5)", "matrix")),
    "RS rows": Bad("rs", scatter(t(4, 3), t(4, 5)), ValueError, ("(4, 5)", "(4, 3)", "needs 3 rows")),
    "RS rows not divisible": Bad("rs", scatter(t(5, 3), t(3, 4)), ValueError, ("(5, 4)", "size 5", "2 ranks")),
    "RS columns not divisible": Bad(
        "rs", scatter(t(4, 3), t(3, 7), dim=1), ValueError, ("(4, 7)", "size 7", "2 ranks")
    ),
    "RS dimension": Bad("rs", scatter(t(4, 3), t(3, 4), dim=-3), ValueError, ("scatter_dim is -3", "(4, 3)")),
    "RS reduce_op": Bad("rs", scatter(t(4, 3), t(3, 4), "max"), ValueError, ("'max'", "'sum' and 'avg'")),
    "RS bool": Bad(
        "rs", scatter(t(4, 3, dtype=torch.bool), t(3, 4, dtype=torch.bool)), TypeError, ("A is torch.bool", DTYPE)
    ),
    "RS two dtypes": Bad(
        "rs", scatter(t(4, 3, dtype=f64), t(3, 4)), TypeError, ("B is torch.float32", "A is torch.float64")
    ),
    "RS two devices": Bad("rs", scatter(t(4, 3, device="meta"), t(3, 4)), TypeError, ("B is on cpu", "A is on meta")),
    "RS group": Bad("rs", lambda _: scatter(t(4, 3), t(3, 4))("nobody"), ValueError, ("no process group", "'nobody'")),
    "RS bias": Bad(
        "rs", scatter(t(4, 3), t(3, 5), "sum", 0, t(0)), ValueError, ("bias of shape (0,)", "the 5 columns of B")
    ),
    "RS bias of a sum": Bad(
        "rs",
        lambda name: ops.fused_matmuls_reduce_scatter([t(4, 3)], [t(3, 5)], None, "sum", 0, name, [t(1, 5)]),
        ValueError,
        ("biases[0] of shape (1, 5)", "the 5 columns of Bs[0]"),
    ),
    "RS bias without a product": Bad(
        "rs",
        lambda name: ops.fused_matmuls_reduce_scatter([], [], t(4, 5), "sum", 0, name, [t(5)]),
        ValueError,
        ("biases has 1 entries and Bs has 0",),
    ),
    # fused_matmul_all_reduce
    "AR 1-D": Bad("ar", reduce(t(3), t(3, 5)), ValueError, ("A of shape (3,)", "at least 2 dimensions")),
    "AR rows": Bad("ar", reduce(t(4, 3), t(4, 5)), ValueError, ("(4, 5)", "(4, 3)", "needs 3 rows")),
    "AR bias": Bad(
        "ar", reduce(t(4, 3), t(3, 5), "sum", t(4, 5)), ValueError, ("bias of shape (4, 5)", "the 5 columns of B")
    ),
    "AR bias of another dtype": Bad(
        "ar", reduce(t(4, 3), t(3, 5), "sum", t(5, dtype=f64)), TypeError, ("bias is torch.float64", "A is torch")
    ),
    "AR reduce_op": Bad("ar", reduce(t(4, 3), t(3, 4), "product"), ValueError, ("'product'", "'sum' and 'avg'")),
    "AR complex": Bad(
        "ar",
        reduce(t(4, 3, dtype=torch.complex64), t(3, 4, dtype=torch.complex64)),
        TypeError,
        ("A is torch.complex64", DTYPE),
    ),
    "AR two dtypes": Bad(
        "ar", reduce(t(4, 3), t(3, 4, dtype=torch.float16)), TypeError, ("B is torch.float16", "A is torch.float32")
    ),
    "AR two devices": Bad("ar", reduce(t(4, 3), t(3, 4, device="meta")), TypeError, ("B is on meta", "A is on cpu")),
    "AR group": Bad("ar", lambda _: reduce(t(4, 3), t(3, 4))("nobody"), ValueError, ("no process group", "'nobody'")),
    # all_gather, reduce_scatter, all_reduce
    "gather dimension": Bad(
        "g", lambda name: ops.all_gather(t(4, 3), 2, name), ValueError, ("gather_dim is 2", "(4, 3)")
    ),
    "gather 0-D": Bad("g", lambda name: ops.all_gather(t(), 0, name), ValueError, ("gather_dim is 0", "()")),
    "gather group": Bad("g", lambda _: ops.all_gather(t(4, 3), 0, ""), ValueError, ("no process group", "''")),
    "scatter size": Bad(
        "s", lambda name: ops.reduce_scatter(t(4, 3), "sum", 1, name), ValueError, ("(4, 3)", "size 3", "2 ranks")
    ),
    "scatter dimension": Bad(
        "s", lambda name: ops.reduce_scatter(t(4, 3), "sum", 2, name), ValueError, ("scatter_dim is 2", "(4, 3)")
    ),
    "scatter reduce_op": Bad(
        "s", lambda name: ops.reduce_scatter(t(4, 3), "min", 0, name), ValueError, ("'min'", "'sum' and 'avg'")
    ),
    "scatter dtype": Bad(
        "s", lambda name: ops.reduce_scatter(t(4, dtype=i32), "sum", 0, name), TypeError, ("X is torch.int32", DTYPE)
    ),
    "reduce dtype": Bad(
        "r", lambda name: ops.all_reduce(t(4, dtype=i32), "sum", name), TypeError, ("X is torch.int32", DTYPE)
    ),
    "reduce reduce_op": Bad(
        "r", lambda name: ops.all_reduce(t(4), "band", name), ValueError, ("'band'", "'sum' and 'avg'")
    ),
    # the ops that gradients use
    "products without factors": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter([t(4, 3)], [], None, "sum", 0, name),
        ValueError,
        ("As has 1 tensors and Bs has 0",),
    ),
    "products of two shapes": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter([t(4, 3), t(4, 3)], [t(3, 2), t(3, 4)], None, "sum", 0, name),
        ValueError,
        ("[4, 2]", "[4, 4]", "one shape"),
    ),
    "an addend of another dtype than the sum": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter(
            [h(4, 3)], [h(3, 2)], h(4, 2).half(), "sum", 0, name, sum_dtype=torch.float32
        ),
        TypeError,
        ("addend is torch.float16", "products of torch.bfloat16 are added in torch.float32"),
    ),
    "a sum in another half": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter(
            [h(4, 3)], [h(3, 2)], None, "sum", 0, name, sum_dtype=torch.float16
        ),
        TypeError,
        ("sum_dtype is torch.float16", "can be torch.bfloat16 or torch.float32"),
    ),
    "a result with fewer bits": Bad(
        "s",
        lambda name: symm_overlap.matmul_reduce_scatter(t(4, 3), t(3, 2), "sum", 0, name, out_dtype=torch.bfloat16),
        TypeError,
        ("out_dtype is torch.bfloat16", "sums of torch.float32", "can be torch.float32"),
    ),
    "a result with more bits than sums have": Bad(
        "s",
        lambda name: symm_overlap.reduce_scatter(h(4, 3), "sum", 0, name, out_dtype=torch.float64),
        TypeError,
        ("out_dtype is torch.float64", "can be torch.bfloat16 or torch.float32"),
    ),
    "nothing to keep": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter_keep([t(4, 3)], [t(3, 2)], None, "sum", 0, name),
        ValueError,
        ("keep is empty and keep_sum is False", "call fused_matmuls_reduce_scatter"),
    ),
    "keep what is not there": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter_keep([t(4, 3)], [t(3, 2)], None, "sum", 0, name, keep=[1]),
        ValueError,
        ("keep is [1]", "0 to 0"),
    ),
    "keep a product twice": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter_keep([t(4, 3)], [t(3, 2)], None, "sum", 0, name, keep=[0, 0]),
        ValueError,
        ("keep is [0, 0]", "once"),
    ),
    "keep of no product": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter_keep([], [], t(4, 3), "sum", 0, name, keep_sum=True),
        ValueError,
        ("As is empty", "symm_overlap.reduce_scatter"),
    ),
    "keep rows": Bad(
        "s",
        lambda name: ops.fused_matmuls_reduce_scatter_keep([t(5, 3)], [t(3, 2)], None, "sum", 0, name, keep=[0]),
        ValueError,
        ("scatter_dim 0", "(5, 2)", "2 ranks cannot share"),
    ),
    "no gradients": Bad(
        "g", lambda name: ops.all_gather_weight_grad(t(4, 3), [], 0, name), ValueError, ("grads is empty",)
    ),
    "weight without match": Bad(
        "g",
        lambda name: ops.fused_all_gather_weight_matmul(t(2, 3), t(5, 3), 1, True, name),
        ValueError,
        ("X of shape (2, 3)", "(5, 6), transposed", "must be 6"),
    ),
    "weight that is no matrix": Bad(
        "g",
        lambda name: ops.fused_all_gather_weight_matmul(t(2, 3), t(5, 3, 1), 1, True, name),
        ValueError,
        ("(5, 3, 1) must be a matrix",),
    ),
    "weight of another dtype": Bad(
        "g",
        lambda name: ops.fused_all_gather_weight_matmul(t(2, 3), t(5, 3).half(), 0, True, name),
        TypeError,
        ("W_shard is torch.float16 and X is torch.float32",),
    ),
    "weight gather_dim": Bad(
        "g",
        lambda name: ops.fused_all_gather_weight_matmul(t(2, 3), t(5, 3), 2, True, name),
        ValueError,
        ("gather_dim is 2", "-2 to 1"),
    ),
    "weight gradient rows": Bad(
        "g",
        lambda name: ops.weight_grad_reduce_scatter(t(2, 4), t(3, 4), "sum", 0, name),
        ValueError,
        ("X of shape (2, 4)", "G of shape (3, 4)"),
    ),
    "weight gradient size": Bad(
        "g",
        lambda name: ops.weight_grad_reduce_scatter(t(2, 3), t(2, 4), "sum", 0, name),
        ValueError,
        ("size 3, which 2 ranks cannot share",),
    ),
    "gradient rows": Bad(
        "g",
        lambda name: ops.all_gather_weight_grad(t(4, 3), [t(7, 5)], 0, name),
        ValueError,
        ("grads[0]", "(7, 5)", "(8,)"),
    ),
}
