"""Nodes of a graph of torch.compile: find those that only rearrange a tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ._torch import known
from .arrangement import Arrangement, Size, moved, permuted, viewed

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
SINGLE = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
PARTS = (aten.expand.default, aten.select.int, aten.slice.Tensor)
"""Ops that take or repeat parts of a tensor. If the result has as many elements, it is a view of the whole tensor."""
SAME = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default)

_UNDECLARED_VIEWS = (operator.getitem, aten._unsafe_view.default, torch.ops._c10d_functional.wait_tensor.default)
"""Ops whose result may be in the memory of their argument, though their schema does not say so."""


def value(node: Node) -> Tensor:
    """Return the fake tensor of a node."""
    found = node.meta["val"]
    assert isinstance(found, Tensor)
    return found


def number(argument: Any) -> Size:
    """Return a size that is passed as a number, or as the node of a symbolic size."""
    size: Size = argument.meta["val"] if isinstance(argument, Node) else argument
    return size


def is_tensor(node: Any) -> bool:
    """True for a node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def has_shape(node: Node, rows: Any, columns: Any) -> bool:
    """True if a tensor is known to be a matrix of this shape."""
    shape = value(node).shape
    return len(shape) == 2 and known(shape[0] == rows) and known(shape[1] == columns)


def same_shape(one: Node, other: Node) -> bool:
    """True if two tensors are known to have the same shape."""
    shapes = value(one).shape, value(other).shape
    return len(shapes[0]) == len(shapes[1]) and all(known(a == b) for a, b in zip(*shapes, strict=True))


def same_strides(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one shape are known to have the same strides, as far as these can be observed."""
    each = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(known(size == 1) or known(first == second) for size, first, second in each)


def same_memory(one: Node, other: Node) -> bool:
    """True if two tensors are in the same memory, as a tensor and its views are."""
    first, second = (value(node).untyped_storage()._cdata for node in (one, other))
    return bool(first == second)


def writes(user: Node, node: Node) -> bool:
    """True if ``user`` writes into its argument ``node``."""
    return any(alias.is_write for alias in _aliases(user, node))


def may_view(user: Node, node: Node) -> bool:
    """True if the result of ``user`` may be in the memory of its argument ``node``.

    The fake tensors do not tell it: those of nodes behind a replaced node are views of that of the replaced one.
    """
    return user.target in _UNDECLARED_VIEWS or any(True for _ in _aliases(user, node))


def _aliases(user: Node, node: Node) -> Iterator[Any]:
    """Yield what the schema of ``user`` says of its arguments that are ``node`` and are written, or that are in the
    memory of a result.
    """
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return
    passed = list(zip(schema.arguments, user.args, strict=False))
    passed += [(argument, user.kwargs[argument.name]) for argument in schema.arguments if argument.name in user.kwargs]
    for argument, given in passed:
        if argument.alias_info is not None and (
            given is node or (isinstance(given, (list, tuple)) and any(item is node for item in given))
        ):
            yield argument.alias_info


def is_ours(node: Node) -> bool:
    """True for an op of this package."""
    return getattr(node.target, "namespace", None) == "symm_overlap"


def is_written(node: Node) -> bool:
    """True for an op of this package that the pass has written."""
    return is_ours(node) and "note" in node.kwargs


@dataclass(frozen=True)
class Step:
    """A node that rearranges another one.

    Attributes:
        source: the node that it rearranges.
        through: nodes between the two, such as the chunks that are concatenated.
        arrange: computes the arrangement of the node from the arrangement of the source; None if there is none.
    """

    source: Node
    through: tuple[Node, ...]
    arrange: Callable[[Arrangement], Arrangement | None]


def step_of(node: Node) -> Step | None:
    """Return how a node rearranges another one, or None if it does anything else."""
    target, args = node.target, node.args
    if not is_tensor(node) or node.op != "call_function" or not args:
        return None
    if target in VIEWS or target in SINGLE or (target in PARTS and _keeps_elements(node)):
        return _step(args[0], lambda arrangement: viewed(arrangement, value(node).shape))
    if _same_bytes(node):
        return _step(args[0], lambda arrangement: arrangement)
    if target is aten.permute.default:
        order = [int(dim) % value(node).dim() for dim in args[1]]  # type: ignore[union-attr, arg-type]
        return _step(args[0], lambda arrangement: permuted(arrangement, order))
    if target is aten.t.default or target is aten.transpose.int:
        order = list(range(value(node).dim()))
        first, second = args[1:3] if target is aten.transpose.int else (0, -1)
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
        return _step(args[0], lambda arrangement: permuted(arrangement, order))
    if target is aten.cat.default:
        return _concatenated_chunks(node)
    return None


def _keeps_elements(node: Node) -> bool:
    """True if the result has as many elements as the tensor from which it is made."""
    source: Any = node.args[0]
    return known(value(source).numel() == value(node).numel())


def _same_bytes(node: Node) -> bool:
    """True for a copy or a view of a tensor with the same bytes: its dtype may differ, but not the size of elements."""
    if node.target is not aten.view.dtype:
        return node.target in SAME
    source: Any = node.args[0]
    return value(source).dtype.itemsize == value(node).dtype.itemsize


def _step(source: Any, arrange: Callable[[Arrangement], Arrangement | None]) -> Step | None:
    return Step(source, (), arrange) if is_tensor(source) else None


def _concatenated_chunks(node: Node) -> Step | None:
    """Match a ``cat`` of all chunks of one tensor in their order. The chunks are getitems of a split, or slices.

    They may be viewed as another dtype: torch has no ``cat`` of float8 numbers, so programs concatenate bytes.
    """
    pieces: Any = node.args[0]
    dim = int(node.args[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    if not isinstance(pieces, (list, tuple)) or not pieces or not all(is_tensor(piece) for piece in pieces):
        return None
    views: list[Node] = []
    if all(value(piece).dtype == value(node).dtype for piece in pieces):
        pieces = [_behind_views(piece, views) for piece in pieces]
    found = _chunks_of_split(pieces) or _slices(pieces)
    if found is None:
        return None
    source, split_dim, through = found
    through = (*through, *views)
    ndim = value(node).dim()
    target = dim % ndim
    return Step(source, through, lambda arrangement: moved(arrangement, len(pieces), split_dim % ndim, target))


def _behind_views(piece: Any, views: list[Node]) -> Any:
    """Return the node of which ``piece`` is a view with the same bytes, and add the nodes between to ``views``."""
    while is_tensor(piece) and _same_bytes(piece):
        views.append(piece)
        piece = piece.args[0]
    return piece


def _chunks_of_split(pieces: Sequence[Any]) -> tuple[Node, int, tuple[Node, ...]] | None:
    if any(piece.target is not operator.getitem for piece in pieces):
        return None
    split = pieces[0].args[0]
    if any(piece.args != (split, position) for position, piece in enumerate(pieces)):
        return None
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    source = split.args[0]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    total = value(source).shape[dim]
    given = split.args[1]
    chunks = [given] * len(pieces) if split.target is aten.split.Tensor else given
    sizes = [number(size) for size in chunks]
    if len(sizes) != len(pieces) or not all(known(len(pieces) * size == total) for size in sizes):
        return None
    return source, dim, (split, *pieces)


def _slices(pieces: Sequence[Any]) -> tuple[Node, int, tuple[Node, ...]] | None:
    """Match slices in order that together cover the whole tensor."""
    first = pieces[0]
    if any(piece.target is not aten.slice.Tensor for piece in pieces):
        return None
    source, dim = first.args[0], (first.args[1] if len(first.args) > 1 else 0)
    total = value(source).shape[dim]
    for position, piece in enumerate(pieces):
        start, end, step = piece.args[2:] + (None, None, 1)[len(piece.args) - 2 :]
        if piece.args[0] is not source or (piece.args[1] if len(piece.args) > 1 else 0) != dim or step != 1:
            return None
        if not known(len(pieces) * number(start or 0) == position * total):
            return None
        end = total if end is None or known(number(end) >= total) else number(end)
        if not known(len(pieces) * end == (position + 1) * total):
            return None
    return source, dim, tuple(pieces)
