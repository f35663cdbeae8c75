"""Nodes of a graph of torch.compile that multiply a tensor by a matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.nn.functional import ScalingType, SwizzleType

from ..runtime import TRAITS
from ._torch import known
from .graph import SAME, VIEWS, aten, has_shape, is_tensor, same_shape, value
from .writer import Writer

_SCALED = ("bias", "scale_result", "out_dtype", "use_fast_accum")
# The recipes of torch.nn.functional.scaled_mm that the ops support: one scale, or one for each row and each column.
_RECIPES = ([ScalingType.TensorWise.value], [ScalingType.RowWise.value])
_NOT_SWIZZLED: tuple[list[int], ...] = ([], [SwizzleType.NO_SWIZZLE.value])
_CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_PACKED = re.compile(r"(mkldnn|mkl)\..*linear")  # what Inductor makes of a matmul with a constant weight
_TURNED = (*VIEWS, aten.permute.default, aten.t.default, aten.transpose.int)


@dataclass(frozen=True)
class Scaled:
    """The arguments of ``torch._scaled_mm`` besides the matrices and the bias."""

    left: Node
    right: Node
    result: Node | None
    dtype: Any
    fast: bool


@dataclass(frozen=True)
class Matmul:
    """A node that computes ``left @ right``, perhaps ``+ bias``. ``left`` may have any number of dimensions.

    Attributes:
        scaled: the scales and other arguments of a float8 matmul; None for any other.
    """

    node: Node
    left: Node
    right: Node
    bias: Node | None = None
    scaled: Scaled | None = None

    @property
    def column_bias(self) -> Node | None:
        """The bias, if it has one number for each column: the ops add it before they round the product."""
        if self.bias is None or self.scaled is not None:
            return self.bias
        bias, columns = value(self.bias), value(self.right).shape[1]
        return self.bias if bias.dim() == 1 and known(bias.shape[0] == columns) else None

    @property
    def other_bias(self) -> Node | None:
        """A bias of any other shape, which is a separate term for the ops."""
        return self.bias if self.column_bias is None else None

    @property
    def inputs(self) -> list[Node]:
        """Every input tensor of the matmul."""
        scales = (self.scaled.left, self.scaled.right, self.scaled.result) if self.scaled else ()
        return [node for node in (self.left, self.right, self.bias, *scales) if node is not None]


def matmul_of(node: Any) -> Matmul | None:
    """Return the matmul that a node computes, or None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    args: tuple[Any, ...] = node.args
    if node.target is aten.mm.default:
        return None if _reads_int8(node) else Matmul(node, *args)
    if node.target is aten._scaled_mm.default:
        left, right, of_left, of_right, *rest = args
        given = dict(zip(_SCALED, rest, strict=False)) | dict(node.kwargs)
        scaled = Scaled(
            of_left, of_right, given.get("scale_result"), given.get("out_dtype"), bool(given.get("use_fast_accum"))
        )
        return Matmul(node, left, right, given.get("bias"), scaled)
    if node.target is aten._scaled_mm_v2.default:
        return _of_recipes(node)
    if node.target is aten.bmm.default:
        return _of_one_matrix(Matmul(node, *args))
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        if _is_weighted(node):
            return None
        found = Matmul(node, args[1], args[2], args[0])
        return found if node.target is aten.addmm.default else _of_one_matrix(found)
    return None


def column_biases(write: Writer, matmuls: Sequence[Matmul]) -> list[Node] | None:
    """Return the biases of matmuls as an argument of an op. None if there are none."""
    biases = [matmul.column_bias for matmul in matmuls]
    if not any(bias is not None for bias in biases):
        return None
    each = zip(matmuls, biases, strict=True)
    # An empty tensor means that there is no bias.
    return [write.call(aten.new_empty.default, one.right, [0]) if bias is None else bias for one, bias in each]


def is_of_different_matrices(node: Node) -> bool:
    """True for a product of batches of matrices, each with another one."""
    return node.target in (aten.bmm.default, aten.baddbmm.default) and matmul_of(node) is None


def why_no_matmul(node: Any) -> str:
    """Return why a matmul of torch cannot be replaced here; empty for every other node."""
    if not isinstance(node, Node):
        return ""
    if _PACKED.match(str(node.target)):
        return "Inductor has packed the weight of this matmul (freezing), so the pass cannot replace it"
    if node.target in (aten.addmm.default, aten.baddbmm.default) and _is_weighted(node):
        return "addmm and baddbmm with other factors than 1 (alpha, beta) are not replaced"
    if node.target is aten.mm.default and _reads_int8(node):
        return "Inductor multiplies by this int8 weight itself, which is quicker than converting it"
    if node.target is not aten._scaled_mm_v2.default or _of_recipes(node) is not None:
        return ""
    return "scaled_mm has other scales than one number for each matrix, or one for each row and each column"


def _is_weighted(node: Node) -> bool:
    return any(node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta"))


def _reads_int8(node: Node) -> bool:
    """True for a matmul that Inductor replaces by one that reads an int8 weight.

    The weight is converted to bfloat16 here, and the product is scaled.
    """
    product = value(node)
    traits = TRAITS.get(product.device.type)
    if product.dtype != torch.bfloat16 or traits is None or not traits.int8_weights:
        return False
    weight: Any = node.args[1]
    while weight.target in _TURNED and is_tensor(weight.args[0]):
        weight = weight.args[0]
    if weight.target not in _CONVERSIONS or value(weight.args[0]).dtype != torch.int8:
        return False
    user = node
    while len(user.users) == 1 and next(iter(user.users)).target in VIEWS:
        (user,) = user.users
    return [each.target for each in user.users] == [aten.mul.Tensor]


def _of_recipes(node: Node) -> Matmul | None:
    """Match ``torch.nn.functional.scaled_mm`` if ``torch._scaled_mm`` would accept its scales too."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    swizzles = given["swizzle_a"], given["swizzle_b"]
    if given["recipe_a"] != given["recipe_b"] or given["recipe_a"] not in _RECIPES or given.get("contraction_dim"):
        return None
    if any(list(swizzle) not in _NOT_SWIZZLED for swizzle in swizzles):
        return None
    (of_left,), (of_right,) = given["scale_a"], given["scale_b"]
    if given["recipe_a"] == _RECIPES[1]:
        rows, columns = value(node).shape
        if not has_shape(of_left, rows, 1) or not has_shape(of_right, 1, columns):
            return None
    scaled = Scaled(of_left, of_right, None, given["out_dtype"], bool(given.get("use_fast_accum")))
    return Matmul(node, given["self"], given["mat2"], given["bias"], scaled)


def _of_one_matrix(matmul: Matmul) -> Matmul | None:
    """Match a batch of matmuls by one matrix that torch has expanded, and return a single matmul by that matrix."""
    source: Any = matmul.right
    while source.target is not aten.expand.default:
        if source.target not in (*VIEWS, *SAME) or not is_tensor(source.args[0]):
            return None
        if not same_shape(source.args[0], source):
            return None
        source = source.args[0]
    source = source.args[0]
    if is_tensor(source) and source.target is aten.unsqueeze.default and source.args[1] == 0:
        source = source.args[0]
    if not is_tensor(source) or value(source).dim() != 2:
        return None
    if not all(known(a == b) for a, b in zip(value(source).shape, value(matmul.right).shape[1:], strict=True)):
        return None
    return replace(matmul, right=source)
