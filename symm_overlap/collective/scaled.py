"""Scaled matmuls of float8 numbers: the arguments of ``torch._scaled_mm`` for some of the rows, and their checks.

A scale is one number for a whole tensor, or one number for each row of ``A`` and each column of ``B``. torch wants both
scales of the same kind. Here one number is also accepted for all rows, or for all columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import scalar_types_to_dtypes, scaled_mm, tensors_with_data
from ..runtime import MultiplyScaled, Operand, Slice, backend_of
from .arguments import remembered, require_matmul

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PRODUCTS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that a product may have, besides float8."""


class Weight(NamedTuple):
    """A weight, with what ``torch._scaled_mm`` needs for the product. The names are those of ``torch._scaled_mm``.

    Attributes:
        B: (K, N). GPUs want it column-major.
        scale: one number, or (1, N).
        bias: (N,), or None.
        result_scale: one number, or None.
        dtype: dtype of the product.
        fast: whether a GPU may accumulate with less precision (``use_fast_accum``).
    """

    B: Any
    scale: Any
    bias: Any
    result_scale: Any
    dtype: torch.dtype
    fast: bool

    def paired(self, A_scale: Tensor, rows: int) -> tuple[Tensor, Weight]:
        """Return the scales of ``rows`` rows, and the weight, with scales of one kind: two numbers, or (rows, 1) and
        (1, N).

        Args:
            A_scale: one number, or (rows, 1).
        """
        numbers = [scale.reshape(()) if scale.numel() == 1 else scale for scale in (A_scale, self.scale)]
        if any(scale.dim() for scale in numbers):
            shapes = ((rows, 1), (1, self.B.shape[1]))
            # A copy, since torch checks the strides of a single number too.
            numbers = [
                scale.expand(shape).clone(memory_format=torch.contiguous_format)
                for scale, shape in zip(numbers, shapes, strict=True)
            ]
        return numbers[0], self._replace(scale=numbers[1])

    def matmul(self, A: Operand, scale: Operand, out: Operand) -> MultiplyScaled:
        """Return ``out = A @ B``, scaled. The scales must come from `paired`."""
        return MultiplyScaled(
            A, scale, self.B, self.scale, self.bias, self.result_scale, self.fast, self.in_float32, out
        )

    def matmul_of_block(self, A: Operand, scale: Operand, out: Operand, first: int, columns: int) -> MultiplyScaled:
        """Return the same for ``columns`` columns of ``B``, from ``first`` on."""
        return self.matmul(A, scale, out)._replace(
            b=Slice(self.B, 1, first, columns),
            scale_b=Slice(self.scale, 1, first, columns) if self.scale.dim() else self.scale,
            bias=None if self.bias is None else Slice(self.bias, -1, first, columns),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are not None."""
        return [tensor for tensor in self[:4] if tensor is not None]

    @property
    def in_float32(self) -> bool:
        """Whether torch has no float8 matmul on the weight's device."""
        return not backend_of(self.B.device.type).multiplies_float8(self.B.device)

    @property
    def variant(self) -> tuple[bool, ...]:
        """Properties, besides the shape of ``B``, in which matmuls of one shape may differ."""
        return self.scale.dim() > 0, self.bias is None, self.result_scale is None, self.fast, self.in_float32


class ScaledMatmul(NamedTuple):
    """``A @ B``, scaled, with or without a bias.

    Attributes:
        A: (..., M, K).
        scale: scale of ``A``: one number, or (..., M, 1).
        weight: ``B`` and everything else.
    """

    A: Any
    scale: Any
    weight: Weight

    def shape(self, A_name: str = "A", B_name: str = "B") -> list[int]:
        """Return the shape of the product.

        Raises:
            TypeError, ValueError: there is no such product, or its dtype cannot be summed.
        """
        A, scale, weight = self
        require_scaled((A_name, A), scale, [(B_name, weight)])
        require_matmul(A_name, A, A.shape[-1] if A.dim() else 0, [(B_name, weight.B)])
        require_row_scales(A_name, A, scale, [(*A.shape[:-1], 1)])
        require_product(weight, PRODUCTS)
        return [*A.shape[:-1], weight.B.shape[1]]


def require_multiplies(A: Tensor, A_scale: Tensor, scales: int, weight: Weight) -> None:
    """Let torch multiply a few rows of such tensors. This shows before any communication whether it can multiply any.

    Args:
        scales: how many scales all rows have together.

    Raises:
        ValueError: torch cannot multiply them on this device.
    """
    backend = backend_of(A.device.type)
    if backend.multiplies_float8(A.device):
        rows = backend.traits.float8_rows_to_try
        _require_multiplies(rows, A.dtype, A_scale, scales, weight, weight.B.stride())


@remembered  # torch converts the whole weight even for no rows, on CPU
def _require_multiplies(
    rows: int, A_dtype: torch.dtype, A_scale: Tensor, scales: int, weight: Weight, strides: tuple[int, ...]
) -> bool:
    """Return True, which `remembered` keeps, unlike None."""

    def ones(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    with tensors_with_data():  # inside `prepare` too: without data torch checks only shapes
        B = torch.empty_strided(weight.B.shape, strides, dtype=weight.B.dtype, device=weight.B.device)
        optional = (ones(weight.bias), ones(weight.result_scale))
        number = torch.ones(() if scales == 1 else (rows, 1), dtype=A_scale.dtype, device=A_scale.device)
        scale, made = Weight(B, ones(weight.scale), *optional, weight.dtype, weight.fast).paired(number, rows)
        A = B.new_empty(rows, B.shape[0], dtype=A_dtype)
        try:
            scaled_mm(A, B, scale, made.scale, *optional, made.dtype, made.fast)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"torch._scaled_mm cannot multiply these tensors: {str(error).splitlines()[0]}") from None
    return True


def weights_of(
    A_dtype: torch.dtype,
    Bs: Sequence[Tensor],
    B_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | int | None],
    use_fast_accum: Sequence[bool],
) -> list[Weight]:
    """Return one `Weight` for each entry of the lists. A product without a dtype has the dtype of ``A``.

    Raises:
        ValueError: there are no weights, or the lists differ in length.
    """
    if not Bs:
        raise ValueError("Bs is empty: give at least one weight")
    lists = {"B_scales": B_scales, "biases": biases, "result_scales": result_scales, "out_dtypes": out_dtypes}
    for name, values in {**lists, "use_fast_accum": use_fast_accum}.items():
        if len(values) != len(Bs):
            raise ValueError(
                f"{name} has {len(values)} entries and Bs has {len(Bs)}: there must be one for each weight"
            )
    dtypes = [dtype or A_dtype for dtype in scalar_types_to_dtypes(out_dtypes)]
    return list(map(Weight, Bs, B_scales, biases, result_scales, dtypes, use_fast_accum))


def require_scaled(A: tuple[str, Tensor], A_scale: Tensor, weights: Sequence[tuple[str, Weight]]) -> None:
    """Require float8 tensors and their scales, all on one device.

    Raises:
        TypeError: they are not.
        ValueError: the scale of a weight is neither one number nor one number for each column.
    """
    multiplied = [A, *((name, weight.B) for name, weight in weights)]
    others = [("A_scale", A_scale)]
    for name, weight in weights:
        others.append((f"the scale of {name}", weight.scale))
        optional = {"bias": weight.bias, "result_scale": weight.result_scale}
        others.extend((f"the {what} of {name}", tensor) for what, tensor in optional.items() if tensor is not None)
    for name, tensor in [*multiplied, *others]:
        if not isinstance(tensor, Tensor):  # the dispatcher lets None through
            raise TypeError(f"{name} is {tensor!r}: give a tensor")
        if tensor.device != A[1].device:
            raise TypeError(f"{name} is on {tensor.device} and {A[0]} is on {A[1].device}: they must be on one device")
    for name, tensor in multiplied:
        if tensor.dtype not in FLOAT8:
            raise TypeError(f"{name} is {tensor.dtype}: supported are {_names(FLOAT8)}")
    for name, weight in weights:
        shape = tuple(weight.scale.shape)
        if prod(shape) != 1 and shape != (1, *weight.B.shape[1:]):
            raise ValueError(
                f"the scale of {name} has shape {shape}: allowed are one number, or one for each column, "
                f"{(1, *weight.B.shape[1:])}"
            )


def require_row_scales(name: str, A: Tensor, A_scale: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless ``A_scale`` is one number, or has one of these shapes."""
    if prod(A_scale.shape) != 1 and tuple(A_scale.shape) not in shapes:
        raise ValueError(
            f"A_scale of shape {tuple(A_scale.shape)} does not match {name} of shape {tuple(A.shape)}: "
            f"allowed are one number, or one for each row, {' or '.join(map(str, shapes))}"
        )


def require_product(weight: Weight, dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless the product has one of these dtypes."""
    if weight.dtype not in dtypes:
        raise TypeError(f"the product is {weight.dtype}: supported are {_names(dtypes)}; choose one with out_dtype")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def without_gradient(op: str, instead: str) -> Callable[..., Any]:
    """Return the backward pass of an op that has no gradient: it raises, and names the op to call ``instead``."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"symm_overlap.{op} has no gradient, since float8 numbers are too coarse for one: call {instead} on "
            "bfloat16 tensors, or call this op in the forward pass of a torch.autograd.Function that has a backward "
            "pass of its own"
        )

    return backward


def keep_nothing(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    """Keep nothing for the backward pass of an op that has no gradient."""
