"""Find out whether a model keeps something of one batch for the next. Stages would not, since the tracer runs the code
between layers on attributes that are still None.

The model is traced for two batches, one after the other. With the second one, it must compute what it computes with the
first, from the second alone. To compare both, every value gets a number: equal operations on values of equal numbers
have equal numbers, and the tensors of the second batch have those of the first.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from .._torch import FakeTensor
from .calls import WHOLE_MODULE, Call
from .effects import graph_in, touched
from .error import TraceError
from .modes import modes_of

_Value = tuple[int, frozenset[int]]
"""(number of a value, the indices of the batches that it depends on)."""


def require_nothing_kept(
    program: torch.export.ExportedProgram, calls: Mapping[int, Call], filled: Collection[str]
) -> None:
    """Check what a model does with two batches; see the top of this file.

    Args:
        program: what it does with both.
        calls: the calls of whole modules, by their number in the graph.
        filled: the names of the attributes that it has filled.

    Raises:
        TraceError: it keeps something.
    """
    values = _Values(program, calls)
    outputs: list[_Value] = []
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = [values.now(value) for value in node.args[0] if isinstance(value, fx.Node)]
        else:
            values.add(node)
    for found in (outputs, values.lasting):
        half = len(found) // 2
        first, second = ([number for number, _ in each] for each in (found[:half], found[half:]))
        if first != second or any(0 in origins for _, origins in found[half:]):
            raise kept_error(
                filled, "does something else with a second batch than with the first, or needs a value of the first"
            )


def kept_error(filled: Collection[str], what: str) -> TraceError:
    """Return the error for a model that keeps something. The arguments: see above, and what it does with two
    batches."""
    return TraceError(
        f"the model {what}: it fills {', '.join(sorted(filled))}, which the stages would not. Keep such values in "
        "buffers that are changed in place (add_, copy_), or in a module that has no layers inside"
    )


class _Values:
    """The values of the nodes of a program.

    Attributes:
        lasting: the changes of buffers and inputs, in order. The stages make them too.
    """

    def __init__(self, program: torch.export.ExportedProgram, calls: Mapping[int, Call]) -> None:
        self._program, self._calls = program, calls
        self._specs = {getattr(spec.arg, "name", None): spec for spec in program.graph_signature.input_specs}
        self._inputs = list(program.graph_signature.user_inputs)
        self._numbers: dict[object, int] = {}
        self._values: dict[fx.Node, _Value] = {}
        self._base: dict[fx.Node, fx.Node] = {}  # for a view, what it is a view of
        self._written: dict[fx.Node, _Value] = {}  # all that was written to the memory of a node
        self.lasting: list[_Value] = []

    def add(self, node: fx.Node) -> None:
        """Add the next node."""
        if node.target is WHOLE_MODULE:
            node.meta["call"] = self._calls[int(str(node.args[1]))]
        shared, changed = touched(node)
        self._base[node] = self._base[shared[0]] if shared else node
        value = self._value(self._key(node), *map(self.now, node.all_input_nodes), batch=self._batch(node))
        in_place = bool(shared and changed) and node.target is not WHOLE_MODULE  # then it returns what it changes
        self._values[node] = self._values[changed[0]] if in_place else value
        bases = [self._base[other] for other in changed]
        for base in bases:
            if base.op != "placeholder":  # later calls of a stage see what buffers keep, and the whole model does
                written = [self._written[base]] if base in self._written else []
                self._written[base] = self._value("written", *written, value)
        call = node.meta.get("call") if node.target is WHOLE_MODULE else None
        if any(base.op == "placeholder" for base in bases) or (call is not None and call.updated):
            self.lasting.append(value)

    def now(self, node: fx.Node) -> _Value:
        """Return the value that a node has now, which depends on what was written to its memory."""
        written = self._written.get(self._base[node])
        return self._values[node] if written is None else self._value("now", self._values[node], written)

    def _value(self, key: object, *inputs: _Value, batch: int | None = None) -> _Value:
        number = self._numbers.setdefault((key, *(number for number, _ in inputs)), len(self._numbers))
        own = frozenset() if batch is None else frozenset({batch})
        return number, own.union(*(origins for _, origins in inputs))

    def _batch(self, node: fx.Node) -> int | None:
        count = len(self._inputs) // 2
        return self._inputs.index(node.name) // count if node.name in self._inputs else None

    def _key(self, node: fx.Node) -> object:
        if node.op == "placeholder":
            if node.name in self._inputs:
                return "input", self._inputs.index(node.name) % (len(self._inputs) // 2)
            spec = self._specs[node.name]
            constant = spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER)
            return _key_of(self._program.constants[spec.target]) if constant else spec.target
        if (graph := graph_in(node)) is not None:
            return self._key_of_graph(graph)
        if node.op == "get_attr":
            return _key_of(operator.attrgetter(str(node.target))(self._program.graph_module))
        if node.target is WHOLE_MODULE:
            call: Call = node.meta["call"]
            return call.name, repr(call.given.constants)
        constants: Any = fx.map_arg((node.args, node.kwargs), lambda argument: None)
        return str(node.target), repr(constants), modes_of(node)

    def _key_of_graph(self, module: fx.GraphModule) -> object:
        """Return a key for a graph that is an argument of an operator: its nodes, with the places of their inputs."""
        places = {node: place for place, node in enumerate(module.graph.nodes)}
        keys: list[object] = []
        for node in places:
            inner = graph_in(node)
            what: object = str(node.target) if inner is None else self._key_of_graph(inner)
            args: Any = fx.map_arg((node.args, node.kwargs), places.__getitem__)
            keys.append((node.op, what if node.op != "placeholder" else None, repr(args)))
        return tuple(keys)


def _key_of(constant: Any) -> object:
    if isinstance(constant, Tensor) and not isinstance(constant, FakeTensor) and not constant.is_meta:
        return str(constant.dtype), tuple(constant.shape), repr(constant.tolist())
    return id(constant)
