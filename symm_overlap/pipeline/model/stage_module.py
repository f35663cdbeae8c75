"""The module of one stage: the model's own modules under their own names, and the operations around them.

Its state dict has the keys that the whole model gives to these parameters. Modules are called and never inspected, so
their hooks, FSDP, and tensor parallelism inside them keep working.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from .cut import Part
from .trace.calls import Call
from .trace.flat import Flat
from .trace.modes import run_in_modes

Tensors = dict[str, Tensor]
Run = Callable[[Sequence[Tensor], Tensors], Any]
"""Computes a stage's result from the tensors it received and from the tensors of the batch."""

Maker = Callable[["StageModule"], Run]
"""Returns a function that computes with the modules of the given stage."""


@dataclass
class Runs:
    """What a stage can run.

    Attributes:
        what: identifies the next calls: the constants of the batch, the mode, what is returned, whether they train, and
            autocast. Together with the shapes of the tensors of the batch, it selects the function to run.
        shared: the tensors of the batch that all microbatches have.
        functions: the functions to run, by ``(what, shapes_of(tensors))``. They call the modules of this stage.
        makers: for each of these functions, what makes it for any stage that has the same modules.
        earlier: the earlier stages of this rank.
    """

    what: Hashable = None
    shared: Tensors = field(default_factory=dict)
    functions: dict[Hashable, Run] = field(default_factory=dict)
    makers: dict[Hashable, Maker] = field(default_factory=dict)
    earlier: Sequence[StageModule] = ()

    def function(self, key: Hashable, stage: StageModule) -> Run | None:
        """Return the function for the stage that has these runs; None if nothing makes it."""
        if key not in self.functions and key in self.makers:
            self.functions[key] = self.makers[key](stage)
        return self.functions.get(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runs:
        """Return the runs of a copy of the stage: they call the modules of the copy."""
        earlier = [memo[id(stage)] for stage in self.earlier if id(stage) in memo]
        return Runs(self.what, self.shared, makers=dict(self.makers), earlier=earlier)


class StageModule(nn.Module):
    """The modules of one stage.

    ``forward(*received, **inputs)`` accepts the tensors that the previous stage returns, and all tensors of the batch
    that are cut into microbatches. It returns a tensor, or a tuple of tensors.

    All other names belong to the model's modules, parameters and buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pipeline_runs = Runs()

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        """See the class."""
        runs = runs_of(self)
        tensors = {**inputs, **runs.shared}
        shapes = shapes_of(tensors)
        run = runs.function((runs.what, shapes), self)
        if run is None:
            raise RuntimeError(f"this stage was not cut for tensors of {shapes}: run it with PipelineModel.run_train")
        return run(received, tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageModule:
        """Return a copy that lists the same parameters as this stage.

        Raises:
            ValueError: an earlier stage of this rank lists one of them, and it has not been copied in the same call.
        """
        for stage in runs_of(self).earlier:
            shared = {id(parameter) for parameter in stage.parameters()}
            names = [name for name, each in self.named_parameters(remove_duplicate=False) if id(each) in shared]
            if names and id(stage) not in memo:
                raise ValueError(
                    f"this stage shares {names[0]} with an earlier stage of its rank, so it cannot be copied without "
                    "that: copy the stages of a rank together, as copy.deepcopy(torch.nn.ModuleList(stages))"
                )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(vars(self), memo))  # type: ignore[no-untyped-call]
        return copied

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """See `torch.nn.Module.named_parameters`. Parameters that an earlier stage of this rank has too are duplicates.

        So each parameter has one optimizer, if every stage has an optimizer for its ``parameters()``.
        """
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        known: set[int] = set()
        if recurse and remove_duplicate:  # without recursion, FSDP and DDP ask every module what it has
            earlier = (nn.Module.named_parameters(stage) for stage in runs_of(self).earlier)
            known = {id(parameter) for found in earlier for _, parameter in found}
        yield from ((name, parameter) for name, parameter in named if id(parameter) not in known)


def runs_of(stage: StageModule) -> Runs:
    """Return what a stage can run."""
    return stage._pipeline_runs


def place(stage: StageModule, name: str, value: nn.Module | Tensor, persistent: bool = True) -> None:
    """Register a module, a parameter or a buffer under the name that the whole model has for it."""
    *path, last = name.split(".")
    owner: nn.Module = stage
    for step in path:
        if step not in dict(owner.named_children()):
            owner.add_module(step, nn.Module())
        owner = owner.get_submodule(step)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(last, value)
    elif isinstance(value, nn.Module):
        owner.add_module(last, value)
    else:
        owner.register_buffer(last, value, persistent)


def has(stage: StageModule, name: str) -> bool:
    """True if there is a module, a parameter or a buffer of that name."""
    try:
        operator.attrgetter(name)(stage)
    except AttributeError:
        return False
    return True


def shapes_of(tensors: Tensors) -> Hashable:
    """Return a key for look-ups of parts. Traced graphs are valid only for what they were traced with."""
    # By name alone: torch.compile cannot sort pairs with tensors.
    each = ((name, tensors[name]) for name in sorted(tensors))
    return tuple((name, tuple(tensor.shape), tensor.stride(), tensor.dtype) for name, tensor in each)


def run_of(part: Part, stage: StageModule) -> Callable[[Sequence[Tensor], Tensors], list[Tensor]]:
    """Return a function that runs the graph of a part with the modules of ``stage``."""
    code = fx.GraphModule(nn.Module(), bound(part, stage))

    def run(received: Sequence[Tensor], tensors: Tensors) -> list[Tensor]:
        return list(code(*received, *(tensors[name] for name in part.inputs)))

    return run


@dataclass(frozen=True, eq=False)
class _Called:
    """The target of a node that calls a module of a stage."""

    stage: StageModule
    call: Call

    def __call__(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        args, kwargs = self.call.given.filled(tensors)
        run = partial(self.stage.get_submodule(self.call.name), *args, **kwargs)
        returned, results = Flat.of(checkpoint(run, use_reentrant=False) if self.call.recomputed else run())
        if returned != self.call.returned:
            raise RuntimeError(
                f"{self.call.name} returned {returned}, but {self.call.returned} when the model was cut: what a module "
                "returns must depend only on the shapes of its arguments"
            )
        return results

    __name__ = "call_module"


@dataclass(frozen=True, eq=False)
class _Attribute:
    """The target of a node that reads a parameter or a buffer of a stage.

    It is looked up at each call, since FSDP may replace it at any time.
    """

    stage: StageModule
    name: str

    def __call__(self) -> Any:
        return operator.attrgetter(self.name)(self.stage)

    __name__ = "get_attribute"


def bound(part: Part, stage: StageModule) -> fx.Graph:
    """Return the graph of a part in which calls of whole modules call the modules of ``stage``."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in part.graph.nodes:
        if node.op == "get_attr":
            copied[node] = graph.call_function(_Attribute(stage, node.target))
            continue
        if node.op == "placeholder":
            copied[node] = graph.placeholder(node.name)  # a name that Python's grammar allows
            continue
        copied[node] = copy = graph.node_copy(node, copied.__getitem__)
        if node in part.calls:
            copy.target = _Called(stage, part.calls[node])
        run_in_modes(copy)
    return graph
