"""What the values of a traced model are, in words that do not depend on the order in which a rank has traced them.

Every rank traces the model itself, and a model may run its code in another order in each process: the order of a set of
strings depends on a number that Python draws when it starts. So the place of a value in the trace does not say to
another rank which value it is. How the value is computed does: by which operators and modules, from which values.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import operator
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from ._torch import HigherOrderOperator, OpOverload, TreeSpec, keys_of, leaf_paths
from .trace.calls import WHOLE_MODULE, Call
from .trace.effects import Constant, touched
from .trace.flat import Flat, Sharding
from .trace.modes import modes_of
from .trace.tracer import Traced
from .trace.vmapped import Vmapped

_PLAIN = (
    bool, int, float, complex, bytes, type(None), type(...), range, torch.dtype, torch.layout, torch.memory_format,
)  # fmt: skip


class Identities:
    """The digests of the values of a traced model: of how each is computed, and if that is not enough, of its uses.

    Values that differ only in the random numbers that were drawn are computed in the same way.
    """

    def __init__(self, traced: Traced) -> None:
        self._known = _of_graph(traced.graph, {})
        self._outputs: dict[Any, list[str]] = {}  # where they are in what the model returns
        paths = leaf_paths(traced.returned.spec)
        for node, index in zip(_outputs(traced.graph), traced.returned.where, strict=True):
            self._outputs.setdefault(node, []).append(str(paths[index]))

    def in_order(self, values: Sequence[fx.Node]) -> list[fx.Node]:
        """Return some values in an order that is the same on all ranks with the same `digest`."""
        return sorted(values, key=dict(zip(values, self._keys(values), strict=True)).__getitem__)

    def digest(self, values: Sequence[fx.Node]) -> str:
        """Return a digest of some values, to compare it with those of other ranks."""
        keys = sorted(self._keys(values))
        # Only their order in the trace tells equal values apart, so then it must be the same on all ranks.
        return _digest(keys, self._trace if _has_equal(keys) else [])

    def _keys(self, values: Sequence[fx.Node]) -> list[tuple[str, ...]]:
        keys: list[tuple[str, ...]] = [(self._known[node],) for node in values]
        return [(self._known[node], self._uses[node]) for node in values] if _has_equal(keys) else keys

    @cached_property
    def _uses(self) -> dict[fx.Node, str]:
        """For each value, a digest of what is computed with it."""
        found: dict[fx.Node, str] = {}
        for node in reversed(self._known):
            known = ChainMap({node: "this value"}, self._known)
            users = [user for user in node.users if user.op != "output"]
            each = sorted((_digest(_inside(user, known) or _words_of(user, known)), found[user]) for user in users)
            found[node] = _digest(each, sorted(self._outputs.get(node, [])))
        return found

    @cached_property
    def _trace(self) -> list[Any]:
        """The whole graph in the order of the trace."""
        numbers = {node: number for number, node in enumerate(self._known)}
        return [
            (known, [numbers[each] for each in node.all_input_nodes], node.target is operator.getitem and node.args[1])
            for node, known in self._known.items()
        ]


def _has_equal(keys: Sequence[Any]) -> bool:
    return len(set(keys)) < len(keys)


def _of_graph(graph: fx.Graph, given: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Return the digests of the nodes of a graph, as they are at its end. Those of its placeholders may be given."""
    found = dict(given)
    results: dict[Any, list[str]] = {}  # of calls of vmap
    sharing: dict[fx.Node, list[fx.Node]] = {node: [node] for node in given}  # the nodes that share its memory
    for node in graph.nodes:
        if node.op == "output" or node in given:
            continue
        if (inside := _inside(node, found)) is not None:
            results[node] = inside
            found[node] = inside[0] if len(inside) == 1 else _digest("results", sorted(inside))
        elif node.target is operator.getitem and node.args[0] in results:
            found[node] = results[node.args[0]][cast(int, node.args[1])]
        else:
            found[node] = _digest(*_words_of(node, found))
        shared, changed = touched(node)
        sharing[node] = list(dict.fromkeys([*(each for other in shared for each in sharing[other]), node]))
        for each in sharing[node]:
            sharing[each] = sharing[node]
        for each in {each: None for other in changed for each in sharing[other]}:
            found[each] = _digest(found[each], "changed by", found[node])
    return found


def _words_of(node: fx.Node, found: Mapping[fx.Node, str]) -> tuple[Any, ...]:
    """Return how a value is computed, from the digests of other values."""
    modes = modes_of(node)
    return (*_computed(node, found), modes.gradients, _words(modes.autocasts, found))


def _computed(node: fx.Node, found: Mapping[fx.Node, str]) -> tuple[Any, ...]:
    if node.op in ("placeholder", "get_attr"):
        return node.op, str(node.target)
    if node.target is WHOLE_MODULE:
        call: Call = node.meta["call"]
        return "call", call.name, call.autocast, call.recomputed, _leaves(call.given, _words(node.args[0], found))
    if node.target is operator.getitem:
        value, index = node.args
        if isinstance(value, fx.Node) and value.target is WHOLE_MODULE:
            returned: Flat = value.meta["call"].returned
            path = leaf_paths(returned.spec)[returned.where[cast(int, index)]]  # dicts may have another order
            return "part", _words(value, found), str(path), _structure(returned.spec)
        return "part", _words(value, found), _words(index, found)
    if isinstance(node.target, Constant):
        return "constant", _words(node.target.value, found)
    args = node.args
    if isinstance(node.target, OpOverload):  # groups have other names on other ranks
        named = zip(node.target._schema.arguments, args, strict=False)
        args = tuple(_words(type(each), {}) if "group" in argument.name else each for argument, each in named)
    return _name(node.target), _words(args, found), _words(dict(node.kwargs), found)


def _inside(node: fx.Node, found: Mapping[fx.Node, str]) -> list[str] | None:
    """Return the digests of what a node returns that runs a call of vmap; None for other nodes."""
    if not isinstance(node.target, Vmapped):
        return None
    inputs = node.target.graph.find_nodes(op="placeholder")
    given = {each: _digest(_words(value, found)) for each, value in zip(inputs, node.args, strict=True)}
    return [_digest("vmap", each) for each in _returned(node.target.graph, given)]


def _returned(graph: fx.Graph, given: Mapping[fx.Node, str]) -> list[Any]:
    found = _of_graph(graph, given)
    return [_words(value, found) for value in _outputs(graph)]


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    (returned,) = graph.output_node().args
    return returned if isinstance(returned, (list, tuple)) else [returned]


def _leaves(flat: Flat, tensors: Sequence[Any]) -> list[Any]:
    """Return what a module is given, without the order of dicts."""
    leaves = [_words(each, {}) for each in flat.constants]
    for index, tensor in zip(flat.where, tensors, strict=True):
        leaves[index] = leaves[index], tensor
    named = zip(map(str, leaf_paths(flat.spec)), leaves, strict=True)
    return [_structure(flat.spec), sorted(named, key=operator.itemgetter(0))]


def _structure(spec: TreeSpec) -> Any:
    """Return how a value is nested, without the order of keys."""
    if spec.is_leaf():
        return "leaf"
    each = [_structure(child) for child in spec.children()]
    keys = keys_of(spec)
    if keys is None:
        return _name(spec.type), _words(spec.context, {}), each
    return _name(spec.type), sorted(zip(map(repr, keys), each, strict=True), key=operator.itemgetter(0))


def _content(tensor: Tensor) -> str | None:
    """Return a digest of what a tensor has; None if it cannot be read, as on the device "meta"."""
    try:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return hashlib.sha256(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"").hexdigest()
    except (RuntimeError, NotImplementedError):
        return None


def _words(value: Any, found: Mapping[fx.Node, str]) -> Any:
    """Return a value such that its text is the same on every rank. Devices lose their index."""
    if isinstance(value, fx.Node):
        return found[value]
    if isinstance(value, enum.Enum):
        return _name(type(value)), value.name
    if isinstance(value, str):
        return repr(re.sub(r"^(\w+):\d+$", r"\1", value))  # as "cuda:0"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [_words(each, found) for each in value]
    if isinstance(value, dict):
        return sorted((repr(key), _words(each, found)) for key, each in value.items())
    if isinstance(value, slice):
        return "slice", _words([value.start, value.stop, value.step], found)
    if isinstance(value, torch.device):
        return "device", value.type
    if isinstance(value, Tensor):
        # A subclass may keep its elements elsewhere.
        return "tensor", tuple(value.shape), str(value.dtype), _content(value) if type(value) is Tensor else None
    if isinstance(value, fx.GraphModule):
        inputs = value.graph.find_nodes(op="placeholder")
        return "graph", _returned(value.graph, {each: f"input {number}" for number, each in enumerate(inputs)})
    if isinstance(value, Sharding):
        return "part", str(value.placements), tuple(value.shape)
    return _name(value if isinstance(value, type) else type(value))


def _name(target: Any) -> str:
    if isinstance(target, (OpOverload, HigherOrderOperator)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _digest(*words: Any) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]
