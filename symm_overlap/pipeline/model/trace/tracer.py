"""Extract the graph of a model around its layers with torch.export: the calls of whole modules, in order.

The graph contains inputs of the model, parameters and buffers that are used outside of whole modules, calls of whole
modules (see calls.py), and the operators between them. It is valid for tensors of the shapes that it was traced with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from .._torch import FakeTensor, FakeTensorMode, detect_fake_mode, keeping_modes
from ..environment import autocast_state
from ..kept_fakes import FunctionCaches
from ..skeleton import Skeleton
from .calls import WHOLE_MODULE, Call, Recorder
from .custom_gradients import require_no_backward_hooks
from .effects import Constant, has_effects
from .error import PassedError, TraceError, failure_message, line_of
from .flat import Flat
from .kept import kept_error, require_nothing_kept
from .modes import GradientsRecorded, note_modes
from .state import State, modules_around
from .vmapped import fold

# Checks of dtypes. They would keep otherwise unused code alive.
_NOT_COPIED = {torch.ops.aten._assert_tensor_metadata.default}

_one_at_a_time = RLock()  # a signal handler may trace too
"""The recorder and torch.export replace functions of torch in the whole process while a model is traced."""


@dataclass(frozen=True)
class Traced:
    """What a model does around its layers.

    Attributes:
        graph: see the top of this file. A placeholder is a tensor of the batch, and its target is the name of that
            tensor.
        calls: for each node that calls a whole module, the call.
        layers: the nodes that call layers, in order.
        returned: how to build what the model returns from the outputs of the graph.
        sharing: for each parameter and buffer of the model, the names of those that share its memory.
    """

    graph: fx.Graph
    calls: dict[fx.Node, Call]
    layers: tuple[fx.Node, ...]
    returned: Flat
    sharing: Mapping[str, set[str]]


class _Root(nn.Module):
    """A model as a function from the tensors of a batch, or of several, to tensors."""

    def __init__(
        self,
        model: nn.Module,
        batch: Flat,
        state: State,
        recorder: Recorder,
        caches: FunctionCaches,
        modes: set[FakeTensorMode],
        returned: Callable[[Flat], None],
        batches: int = 1,
    ) -> None:
        super().__init__()
        self.model, self.batch, self.batches = model, batch, batches
        # Functions, since export may copy the module, and reverts assignments to attributes.
        self.empty_caches: Callable[[], None] = lambda: caches.empty()
        self.note: Callable[[FakeTensorMode], None] = lambda mode: modes.add(mode)
        self.begin: Callable[[nn.Module], None] = lambda model: state.begin(model)
        self.end: Callable[[], None] = lambda: state.end()
        self.undo: Callable[[], None] = lambda: state.undo()
        self.flat: Callable[[Any], tuple[Flat, list[Tensor]]] = lambda value: recorder.flat(value, "returns")
        self.returned = returned

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        count = len(self.batch.where)
        if (mode := detect_fake_mode(tensors)) is not None:
            self.note(mode)
        self.empty_caches()  # torch.export calls this several times
        self.begin(self.model)
        try:
            given = [tensors[index * count : (index + 1) * count] for index in range(self.batches)]
            with GradientsRecorded():
                returned = [self.model(**self.batch.filled(each)) for each in given]
            self.end()
        finally:
            self.undo()
        try:
            flat, results = self.flat(returned if self.batches > 1 else returned[0])
        except TypeError as error:
            raise PassedError(
                f"{type(self.model).__name__} returns {error}, in which torch finds no tensors: register its class "
                "with torch.export.register_dataclass, or let the model return tensors"
            ) from None
        self.returned(flat)
        return results


def trace(
    skeleton: Skeleton,
    whole: dict[str, nn.Module],
    layers: Sequence[str],
    batch: Flat,
    tensors: Mapping[str, Tensor],
    gradients: bool = True,
) -> Traced:
    """Return the graph of a model.

    Args:
        whole: the whole modules of the skeleton, by name.
        layers: the names of those whole modules that are layers.
        batch, tensors: the keyword arguments of the model for one microbatch, and their tensors by name.
        gradients: whether the graph is for training.

    Raises:
        TraceError: the model cannot be traced; the message says where, and what to do.
    """
    returned: list[Flat] = []
    state = State(whole)
    require_no_backward_hooks(modules_around(skeleton.model, whole))
    names = {id(module): name for name, module in skeleton.model.named_modules()}

    def exported(batches: int) -> torch.export.ExportedProgram:
        fakes = tuple(skeleton.fake(tensor) for _ in range(batches) for tensor in tensors.values())
        root = _Root(skeleton.model, batch, state, recorder, caches, skeleton.modes, returned.append, batches)
        try:
            with keeping_modes():
                program = torch.export.export(root, fakes, strict=False)
        except Exception as error:
            raise TraceError(failure_message(error, skeleton.model, names, bool(recorder.dtensors))) from error
        note_modes(program.graph, recorder.calls, gradients, autocast)
        return program

    # Not as the caller has set it: a no_grad() around a training step leaves no trace in the graph.
    autocast = autocast_state()
    caches = FunctionCaches()
    recorder = Recorder(skeleton.model, whole, state, caches)
    with _one_at_a_time, torch.inference_mode(False), torch.set_grad_enabled(gradients), caches, recorder:
        program = exported(1)
        if drawn := state.draws.ends:
            exported(1)  # what another thread has drawn meanwhile is not drawn again
            _require_not_drawn(drawn, state.draws.ends)
        if state.filled and tensors:
            try:
                twice = exported(2)
            except TraceError as error:
                raise kept_error(state.filled, "cannot compute a second batch after the first") from error
            require_nothing_kept(twice, recorder.calls, state.filled)
    return _Copy(program, recorder.calls, layers, tensors).traced(returned[0], skeleton.sharing)


def _require_not_drawn(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> None:
    """Check that two calls of a model have not drawn the same random numbers between its layers.

    Raises:
        TraceError: they have.
    """
    for name, end in first.items():
        if second.get(name) == end:
            raise TraceError(
                f"the model draws random numbers from {name} between its layers. They would be drawn only once, while "
                "the model is cut, and could differ between ranks. Draw them in a layer, or before the call and pass "
                "them in the batch"
            )


class _Copy:
    """Copies the graph of an exported program. In the copy, only the batch is an input; parameters are attributes."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        calls: dict[int, Call],
        layers: Sequence[str],
        inputs: Iterable[str],
    ) -> None:
        self._program, self._numbered, self._layers = program, calls, set(layers)
        self._inputs = iter(inputs)
        self._specs = {getattr(spec.arg, "name", None): spec for spec in program.graph_signature.input_specs}
        self._graph = fx.Graph()
        self._calls: dict[fx.Node, Call] = {}
        self._of: dict[fx.Node, fx.Node] = {}

    def traced(self, returned: Flat, sharing: Mapping[str, set[str]]) -> Traced:
        for node in self._program.graph.nodes:
            if node.op == "output":
                self._graph.output(tuple(self._of[value] for value in node.args[0]))
            elif node.target not in _NOT_COPIED:
                copied = self._copied(node)
                copied.meta = dict(node.meta)
                self._of[node] = copied
        fold(self._graph)
        self._graph.eliminate_dead_code(self._has_effects)
        for node in self._graph.nodes:
            _require_value(node)
        live = set(self._graph.nodes)
        calls = {node: call for node, call in self._calls.items() if node in live}
        layers = tuple(node for node in self._graph.nodes if node in calls and calls[node].name in self._layers)
        if not layers:
            names = ", ".join(sorted(self._layers)[:4]) + (", ..." if len(self._layers) > 4 else "")
            raise TraceError(
                f"the model does not call any of the layers {names}, or uses nothing of what they return. A ModuleList "
                "is never called itself, and layer.forward(...) is no call of a module: choose other layers with "
                "layer_cls or layer_names"
            )
        return Traced(self._graph, calls, layers, returned, sharing)

    def _copied(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self._program.graph_module)
            return self._graph.call_function(Constant(value))
        copied = self._graph.node_copy(node, self._of.__getitem__)
        if node.target is WHOLE_MODULE:
            node.meta["call"] = self._calls[copied] = self._numbered[int(str(node.args[1]))]
        return copied

    def _input(self, node: fx.Node) -> fx.Node:
        spec = self._specs[node.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            node.meta["is_parameter"] = spec.kind == InputKind.PARAMETER
            return self._graph.create_node("get_attr", spec.target.removeprefix("model."))
        if spec.kind == InputKind.USER_INPUT:
            return self._graph.placeholder(next(self._inputs))
        return self._graph.call_function(Constant(self._program.constants[spec.target]))

    def _has_effects(self, node: fx.Node) -> bool:
        return has_effects(node, self._calls.get(node))


def _require_value(node: fx.Node) -> None:
    """Check that a constant is no tensor without memory: no stage could compute with it.

    Raises:
        TraceError: it is one. The model has taken it from the inside of a module, or past the tracer.
    """
    if isinstance(node.target, Constant) and isinstance(node.target.value, FakeTensor):
        raise TraceError(
            "the model uses a tensor that is computed with each batch, but does not pass through the results of its "
            f"modules{line_of(next(iter(node.users)))}. It may be an attribute that a module sets in its forward, an "
            "output that a hook keeps, what code keeps in a global dict, x.data, or computed in torch.vmap in a way "
            "that torch.export loses. Let the module return it, use x.detach(), or cut without tracing (trace=False)"
        )
