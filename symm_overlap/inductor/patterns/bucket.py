"""Buckets: tensors that are flattened and concatenated for one collective, and split from its result again. If each of
them is multiplied, each gets a collective of its own, after its matmul or before it.

==============  ======================================  ===============================================
all-gather      ``gather(cat([a, b]))``                 ``.view(world, -1).split([a.numel(), ...], 1)``
reduce-scatter  ``scatter(cat([a, b], 1).flatten())``   ``.split([a.shape[1], b.shape[1]])``
all-reduce      ``reduce(cat([a, b]))``                 ``.split([a.numel(), b.numel()])``
==============  ======================================  ===============================================

In the second row each tensor has shape (world, elements of one rank); in the others it has one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch.fx import Graph, Node

from .._torch import known
from ..choices import Choices
from ..graph import VIEWS, aten, has_shape, value
from ..writer import Writer
from .all_gather import AllGather
from .all_reduce import AllReduce
from .pattern import Pattern, c10d, is_unwritten
from .reduce_scatter import ReduceScatter

_PATTERNS: tuple[type[Pattern], ...] = (AllGather, ReduceScatter, AllReduce)


def empty_buckets(graph: Graph, choices: Choices) -> None:
    """Rewrite the buckets in which every tensor has a matmul beside it."""
    patterns: dict[Any, type[Pattern]] = {pattern.target: pattern for pattern in _PATTERNS}
    for node in list(graph.nodes):
        if node.target in patterns:
            bucket = _bucket(node)
            if bucket is not None:
                pieces: Any = bucket.args[0]
                taken = _taken(node, [int(value(piece).shape[-1]) for piece in pieces])
                if taken is not None:
                    _empty(graph, node, patterns[node.target], bucket, taken, choices)


def _bucket(node: Node) -> Node | None:
    """Return the ``cat`` that is the input of a collective if it forms a bucket of tensors, or None."""
    bucket: Any = node.args[0]
    rows = node.target is ReduceScatter.target
    if rows and bucket.target in VIEWS and value(bucket).dim() == 1 and len(bucket.users) == 1:
        bucket = bucket.args[0]
    if len(bucket.users) > 1 or bucket.target is not aten.cat.default or value(bucket).dim() != (2 if rows else 1):
        return None
    pieces: Sequence[Node] = bucket.args[0]
    dim = bucket.args[1] if len(bucket.args) > 1 else 0
    if dim % value(bucket).dim() != int(rows) or (rows and not known(value(bucket).shape[0] == node.args[2])):
        return None
    fits = all(isinstance(value(piece).shape[-1], int) and value(piece).dim() == 1 + rows for piece in pieces)
    alike = all(value(piece).dtype == value(bucket).dtype for piece in pieces)  # cat promotes other dtypes
    return bucket if fits and alike and len(pieces) > 1 and is_unwritten(pieces) else None


def _taken(node: Node, sizes: list[int]) -> dict[Node, int] | None:
    """Return the nodes that extract a tensor from the result, with its index; None if anything else uses the result."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not c10d.wait_tensor.default:
        return None
    whole, dim = users[0], 0
    if node.target is AllGather.target:
        users = list(whole.users)
        if len(users) != 1 or users[0].target not in VIEWS or not has_shape(users[0], node.args[1], sum(sizes)):
            return None
        whole, dim = users[0], 1
    taken: dict[Node, int] = {}
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    for user in whole.users:
        args: tuple[Any, ...] = user.args
        if user.target is aten.split_with_sizes.default and (*args, 0)[1:3] == (sizes, dim):
            for item in user.users:
                index: Any = item.args[1]
                taken[item] = index
        elif user.target is aten.slice.Tensor:
            of, start, end, step = args[1:] + (0, None, None, 1)[len(args) - 1 :]
            cut = (start or 0, sum(sizes) if end is None else min(end, sum(sizes)))
            if of != dim or step != 1 or cut not in bounds:
                return None
            taken[user] = bounds.index(cut)
        else:
            return None
    return taken or None


def _empty(
    graph: Graph, node: Node, pattern: type[Pattern], bucket: Node, taken: dict[Node, int], choices: Choices
) -> None:
    """Give every tensor a collective of its own. If one of them has no matmul beside it, the graph stays as it is."""
    write = Writer(graph, node)
    pieces: Any = bucket.args[0]
    singles, results = [], []
    for piece in pieces:
        singles.append(write.call(pattern.target, write.reshape(piece, [value(piece).numel()]), *node.args[1:]))
        results.append(write.call(c10d.wait_tensor.default, singles[-1]))
    own = {user: write.reshape(results[index], list(value(user).shape)) for user, index in taken.items()}
    for user, result in own.items():
        user.replace_all_uses_with(result)
    args = bucket.args
    bucket.args = ([], *args[1:])  # so that the bucket does not count as another user of its tensors
    if all(pattern(graph, single, choices).candidate for single in singles):
        _erase(graph, {bucket, *taken})
        return
    bucket.args = args
    for user, result in own.items():
        result.replace_all_uses_with(user)
    write.undo()


def _erase(graph: Graph, old: set[Node]) -> None:
    """Remove the bucket, its collective, and the nodes that extracted its tensors."""
    left = [*old]
    while left:
        old.update(left)
        left = [source for each in left for source in each.all_input_nodes]
    for each in reversed(list(graph.nodes)):
        if each in old and each.op == "call_function" and not each.users:
            graph.erase_node(each)
