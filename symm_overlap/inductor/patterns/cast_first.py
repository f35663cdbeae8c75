"""Cast first and gather afterwards, where a gathered tensor is only used after a cast to another dtype.

This is what autocast produces: a float32 tensor is gathered, and then cast to bfloat16 for a matmul. A cast changes
each number by itself, so each rank can cast its shard. Every bit stays the same, and fewer bytes are sent.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..graph import aten, is_tensor, same_memory, step_of, value
from ..matmul import matmul_of
from ..writer import Writer
from .casts import is_cast
from .gathered import CHUNKS, Gathered
from .pattern import SkipError, c10d, require_unwritten


def cast_first(graph: Graph) -> None:
    """Cast the shard wherever the gathered tensor is cast anyway, for a matmul."""
    for node in list(graph.nodes):
        if node.target is c10d.all_gather_into_tensor.default:
            gathered = Gathered(node)
            casts = _casts(gathered)
            if any(map(_is_multiplied, casts)) and not why_not_first(gathered):
                _replace(graph, gathered, casts)


def why_not_first(gathered: Gathered) -> str:
    """Return why the shard cannot be cast first. The text is empty if it can be, or if no matmul uses a cast of the
    gathered tensor.
    """
    casts = _casts(gathered)
    if not any(map(_is_multiplied, casts)):
        return ""
    own, dtypes = value(gathered.node).dtype, {value(cast).dtype for cast in casts}
    named = "it is cast to " + " and ".join(sorted(map(str, dtypes))) + " before a matmul"
    if len(dtypes) > 1:
        return named
    (dtype,) = dtypes
    if dtype.itemsize > own.itemsize:
        return f"{named}, and cast first, it would move more bytes: gather {dtype}, or multiply {own}"
    allowed = {*gathered.involved, *casts}
    users = (user for node in gathered.involved for user in node.users if user.target is not aten.sym_size.int)
    if any(user not in allowed for user in users):
        return f"{named}, and something else uses it without the cast"
    if any(is_tensor(node) and value(node).dtype != own for node in gathered.involved):
        return f"{named}, and is viewed as another dtype"
    try:
        require_unwritten([gathered.shard, *gathered.involved])
    except SkipError as skipped:
        return str(skipped)
    return ""


def _casts(gathered: Gathered) -> list[Node]:
    return [user for node in gathered.nodes for user in node.users if is_cast(user)]


def _is_multiplied(cast: Node) -> bool:
    """True if a matmul uses this node, possibly rearranged."""
    left = [cast]
    while left:
        for user in left.pop().users:
            if matmul_of(user) is not None:
                return True
            if step_of(user) is not None or user.target in CHUNKS:
                left.append(user)
    return False


def _replace(graph: Graph, gathered: Gathered, casts: list[Node]) -> None:
    """Cast the shard, and repeat with the result everything that was done with the gathered tensor."""
    write = Writer(graph, gathered.node)
    target: Any = casts[0].target
    new = {gathered.shard: write.call(target, gathered.shard, *casts[0].args[1:], **casts[0].kwargs)}
    involved = [node for node in graph.nodes if node in gathered.involved]
    for node in involved:
        args, kwargs = map_arg((node.args, node.kwargs), lambda argument: new.get(argument, argument))
        new[node] = Writer(graph, node).call(node.target, *args, **kwargs)
        for user in list(node.users):
            if user.target is aten.sym_size.int:
                user.replace_input_with(node, new[node])
    taken: list[Node] = []
    for cast in casts:
        found = new[cast.all_input_nodes[0]]
        if any(same_memory(found, other) for other in taken):  # the program may write to one of its casts
            found = Writer(graph, cast).call(aten.clone.default, found)
        taken.append(found)
        cast.replace_all_uses_with(found)
    for node in (*casts, *reversed(involved)):
        graph.erase_node(node)
