"""The calls that `autotune` measures, as users describe them: with shapes in place of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..arguments import DTYPES, Group, group_name
from ..choosing.prediction import ACTIVATIONS
from ..ops.all_gather import all_gather
from ..ops.all_gather_matmul import all_gather_matmul
from ..ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from ..ops.all_gather_weight_matmul import all_gather_weight_matmul
from ..ops.all_reduce import all_reduce
from ..ops.matmul_all_reduce import matmul_all_reduce
from ..ops.matmul_reduce_scatter import matmul_reduce_scatter
from ..ops.reduce_scatter import reduce_scatter
from ..ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
from ..problem import OPS
from ..scaled import FLOAT8

Shape = Sequence[Any]
"""(op, m, n, k), as in `symm_overlap.explain`, or (op, *arguments); see `autotune`."""


def weight_grad_reduce_scatter(
    X: torch.Tensor, G: torch.Tensor, reduce_op: str, scatter_dim: int, group: Group
) -> torch.Tensor:
    """Compute the gradient of the weight in `all_gather_weight_matmul`."""
    return torch.ops.symm_overlap.weight_grad_reduce_scatter(X, G, reduce_op, scatter_dim, group_name(group))  # type: ignore[no-any-return]


_FUNCTIONS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (
        all_gather_matmul,
        matmul_reduce_scatter,
        matmul_all_reduce,
        all_gather,
        reduce_scatter,
        all_reduce,
        all_gather_weight_matmul,
        weight_grad_reduce_scatter,
        all_gather_scaled_matmul,
        scaled_matmul_reduce_scatter,
    )
}

_ALIKE: dict[str, Callable[[int, int, int, int], tuple[Any, ...]]] = {
    "all_gather_matmul": lambda m, n, k, part: ((part, k), [(k, n)], 0, {"return_A": False}),
    "matmul_reduce_scatter": lambda m, n, k, part: ((m, k), (k, n), "sum", 0),
    "matmul_all_reduce": lambda m, n, k, part: ((m, k), (k, n), "sum"),
    "all_gather": lambda m, n, k, part: ((part, n), 0),
    "reduce_scatter": lambda m, n, k, part: ((m, n), "sum", 0),
    "all_reduce": lambda m, n, k, part: ((m, n), "sum"),
    "all_gather_weight_matmul": lambda m, n, k, part: ((ACTIVATIONS, m), (part, n), 0),
    "weight_grad_reduce_scatter": lambda m, n, k, part: ((ACTIVATIONS, m), (ACTIVATIONS, n), "sum", 0),
    "all_gather_scaled_matmul": lambda m, n, k, part: ((part, k), [(k, n)], (), [()], 0, {"return_A": False}),
    "scaled_matmul_reduce_scatter": lambda m, n, k, part: ((m, k), (k, n), (), (), "sum", 0),
}
"""The arguments of a call with these m, n and k; ``part`` is a rank's part of m."""


class Described(NamedTuple):
    """The description of a tensor that is created later.

    Attributes:
        column_major: whether it is a matrix whose columns are contiguous in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    column_major: bool = False

    def make(self, device: torch.device) -> torch.Tensor:
        """Create the tensor, with random numbers."""
        shape = self.shape[::-1] if self.column_major else self.shape
        made = torch.randn(shape, device=device).to(self.dtype)
        return made.t() if self.column_major else made


@dataclass(frozen=True)
class Wanted:
    """A call to measure. Ranks that describe the same call get the same ``repr``.

    Attributes:
        op: the name of the op.
        arguments: (name, value) pairs, with `Described` in place of tensors.
    """

    op: str
    arguments: tuple[tuple[str, Any], ...]

    def make(self, device: torch.device) -> Callable[[Group], object]:
        """Return a function that makes the call in a group, with newly created tensors."""

        def made(value: Any) -> Any:
            if isinstance(value, Described):
                return value.make(device)
            return [made(item) for item in value] if isinstance(value, (list, tuple)) else value

        arguments = {name: made(value) for name, value in self.arguments}
        return lambda group: _FUNCTIONS[self.op](**arguments, group=group)


def wanted(shape: Shape, dtype: torch.dtype, world: int) -> Wanted:
    """Return the call that ``shape`` describes.

    Raises:
        ValueError, TypeError: ``shape`` does not describe a call.
    """
    if isinstance(shape, str) or not isinstance(shape, Sequence) or len(shape) < 2 or not isinstance(shape[0], str):
        raise TypeError(f"autotune: {shape!r} is not a shape: give (op, m, n, k) or (op, *arguments)")
    op, *given = shape
    if op not in _FUNCTIONS:
        raise ValueError(f"autotune: op is {op!r}: allowed are {', '.join(_FUNCTIONS)}")
    if dtype not in (*DTYPES, *FLOAT8):
        raise ValueError(f"autotune: dtype is {dtype}: allowed are {', '.join(map(str, (*DTYPES, *FLOAT8)))}")
    if all(isinstance(size, int) for size in given):
        given = [*_alike(op, given, world)]
        if op == "scaled_matmul_reduce_scatter" and dtype not in FLOAT8:
            given.append({"out_dtype": dtype})
    keywords = given.pop() if isinstance(given[-1], dict) else {}
    try:
        bound = inspect.signature(_FUNCTIONS[op]).bind(*given, group=None, **keywords).arguments
    except TypeError as error:
        raise TypeError(f"autotune: {shape!r}: {error}: give the arguments of {op} without the group") from None
    if OPS[op].scaled and dtype not in FLOAT8:
        dtype = torch.float8_e4m3fn
    scaled = {"bias": bound.get("out_dtype") or torch.bfloat16} if OPS[op].scaled else {}
    found = {name: _described(name, value, dtype, scaled) for name, value in bound.items() if name != "group"}
    return Wanted(op, tuple(found.items()))


def _alike(op: str, sizes: Sequence[int], world: int) -> tuple[Any, ...]:
    multiplies = OPS[op].multiplies and not OPS[op].moves_weight
    if len(sizes) != 3 or min(sizes[:2]) < 1 or (sizes[2] < 1 if multiplies else sizes[2] != 0):
        raise ValueError(
            f"autotune: {(op, *sizes)}: give m, n and k, ints from 1 on; k is 0 for an op without a matmul, and for an "
            "op in which a weight travels"
        )
    m, n, k = sizes
    if m % world and not OPS[op].replicates:
        raise ValueError(f"autotune: {(op, *sizes)}: {m} rows cannot be divided evenly among {world} ranks")
    return _ALIKE[op](m, n, k, m // world)


def _described(name: str, value: Any, dtype: torch.dtype, scaled: dict[str, torch.dtype]) -> Any:
    """Return an argument with `Described` in place of tensors and of shapes."""
    if isinstance(value, torch.Tensor):
        return Described(tuple(value.shape), value.dtype, value.dim() == 2 and value.stride(0) == 1 < value.stride(1))
    if not isinstance(value, (list, tuple)):
        return value
    if all(isinstance(size, int) for size in value) and (value or isinstance(value, tuple)):
        if "scale" in name:
            return Described(tuple(value), torch.float32)
        # GPUs multiply float8 only with column-major weights.
        weight = name in ("B", "Bs") and dtype in FLOAT8
        return Described(tuple(value), scaled.get("bias", dtype) if name.startswith("bias") else dtype, weight)
    return tuple(_described(name, item, dtype, scaled) for item in value)
