"""Calls of whole modules while a model is traced: each becomes one operator in the graph.

To torch's tracer, `whole_module` is an opaque operator. What the module returns is found by running its forward on fake
tensors. When a stage runs, the module itself is called, with its hooks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .._torch import (
    as_in_eager_mode,
    depends_on_values,
    ignoring_new_sizes,
    saved_tensors_hooks,
    tree_flatten,
    without_function_modes,
)
from ..environment import Autocast, autocast_state, computes_gradients
from ..kept_fakes import FunctionCaches
from .custom_gradients import RefusedGradients
from .error import PassedError
from .flat import Flat
from .foreign import Parameters
from .state import State
from .watch import Watch, memory_of


@dataclass
class Call:
    """One call of a whole module.

    Attributes:
        name: the name of the module.
        module: the fake copy of the module.
        kind: its class.
        parameters: those of the whole model.
        given: its arguments (args, kwargs).
        inputs: the tensors in the arguments.
        autocast: the state of autocast in which the model calls it.
        gradients: whether gradients are computed where the model calls it.
        recomputed: the model calls it in a checkpoint.
        returned: what it returns; known once it has run.
        changed: the indices of the tensors in its arguments that it changes in place.
        shared: the indices of the tensors in its arguments whose memory it returns.
        updated: the names of the module's buffers that it changes.
        repeatable: it has no parameters, changes nothing and draws no random numbers, so several stages may call it.
    """

    name: str
    module: nn.Module
    kind: type[nn.Module]
    parameters: Parameters
    given: Flat
    inputs: list[Tensor]
    autocast: Autocast
    gradients: bool
    recomputed: bool = False
    returned: Flat | None = None
    changed: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    repeatable: bool = False

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Call the fake module with other tensors."""
        args, kwargs = self.given.filled(tensors)
        # Not type(module).__call__, which would record the call again, or recompute activations.
        return nn.Module.__call__(self.module, *args, **kwargs)


_numbers = itertools.count()
_calls: dict[int, Call] = {}

_LIBRARY = torch.library.Library("symm_overlap_pipeline", "DEF")
_LIBRARY.define("whole_module(Tensor[] tensors, int call) -> Tensor[]")


def _watched(record: Call, args: Any, kwargs: Any) -> tuple[Any, Watch, list[str]]:
    """Call the fake module. Return what it returns, what it does, and the names of the buffers that it changes."""
    before = dict(record.module.named_buffers(remove_duplicate=False))
    with as_in_eager_mode(args, kwargs), ExitStack() as stack, Watch() as watch:
        for device, dtype in record.autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode())  # which has keys of its own
        stack.enter_context(ignoring_new_sizes(args, kwargs))
        stack.callback(_set_class, record.module, type(record.module))
        _set_class(record.module, record.kind)  # which its forward may look at
        outputs = nn.Module.__call__(record.module, *args, **kwargs)
    after = dict(record.module.named_buffers(remove_duplicate=False))
    changed = [n for n, old in before.items() if after.get(n) is not old or memory_of(old) in watch.written]
    return outputs, watch, changed


def _has_one_copy_in_training(record: Call, args: Any, kwargs: Any) -> bool:
    """True if the module has buffers, and changes them or draws random numbers in training, but not in this mode: then
    it must have one copy in evaluation too. The stages of training have no other, and only one is kept up to date.
    """
    modes = {module: module.training for module in record.module.modules()}
    if all(modes.values()) or next(record.module.buffers(), None) is None:
        return False
    try:
        for module in modes:
            module.training = True
        _, watch, changed = _watched(record, args, kwargs)
        return watch.random or bool(changed)
    except Exception:  # a module for evaluation alone
        return True
    finally:
        for module, mode in modes.items():
            module.training = mode


def _run_on_fakes(tensors: list[Tensor], call: int) -> list[Tensor]:
    """Run a module's forward to learn what it returns."""
    record = _calls[call]
    what = f"{record.name} ({_class(record.module)})"
    args, kwargs = record.given.filled(tensors)
    leaves, spec = tree_flatten((args, kwargs))
    outputs, watch, record.updated = _watched(record, args, kwargs)
    same_leaves, same_spec = tree_flatten((args, kwargs))
    if same_spec != spec or any(a is not b for a, b in zip(leaves, same_leaves, strict=True)):
        raise PassedError(
            f"{what} changes one of its arguments, a list, a dict or a cache: layers "
            "on other ranks would not see the change. Let it return a new value, or call the model such that it keeps "
            "nothing (use_cache=False in models of Hugging Face)"
        )
    record.parameters.require_own(watch.parameters, what, record.module, tensors)
    record.changed = [index for index, tensor in enumerate(tensors) if memory_of(tensor) in watch.written]
    same = not record.changed and not record.updated and not watch.random
    alone = next(record.module.parameters(), None) is None
    record.repeatable = alone and same and not _has_one_copy_in_training(record, args, kwargs)
    try:
        record.returned, results = Flat.of(outputs)
    except TypeError as error:
        raise PassedError(
            f"{what} returns {error}, which is not a tensor: only tensors, constants, "
            "lists, tuples and dicts of them, and classes that torch.export.register_dataclass knows can pass between "
            "layers"
        ) from None
    if any(depends_on_values(result) for result in results):
        raise PassedError(
            f"{what} returns a tensor whose size depends on the values of tensors, so "
            "the layers behind it cannot be traced. Let it return all elements, or cut the model with trace=False"
        )
    returned = {memory_of(result) for result in results}
    record.shared = [index for index, tensor in enumerate(tensors) if memory_of(tensor) in returned]
    return [torch.empty_like(result) for result in results]


torch.library.register_fake("symm_overlap_pipeline::whole_module", _run_on_fakes, lib=_LIBRARY)
WHOLE_MODULE = torch.ops.symm_overlap_pipeline.whole_module.default


def _dtensors(value: Any) -> list[DTensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, DTensor)]


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _instead(given: Any) -> str:
    """Say what to do about arguments that are neither tensors nor constants."""
    leaves = tree_flatten(given)[0]
    if any(isinstance(leaf, (torch.SymBool, torch.SymInt, torch.SymFloat)) for leaf in leaves):
        return "The model takes it from a tensor (item()): pass the tensor, and use torch.where in place of `if`"
    if any(isinstance(leaf, nn.Module) for leaf in leaves):
        return "Make it an attribute of the layer instead"
    return "Call the model such that it passes none (use_cache=False for the caches of Hugging Face)"


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)  # its own __setattr__ may refuse


class Recorder:
    """Records the calls of whole modules of a model while it is open.

    Args:
        model: the skeleton.
        modules: its whole modules by name. Their classes are replaced while the recorder is open.
        state: the state of the skeleton.

    Attributes:
        calls: the recorded calls, by their number in the graph.
        dtensors: the DTensors that modules have returned.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], state: State, caches: FunctionCaches) -> None:
        self._modules, self._state, self._caches = modules, state, caches
        self.calls: dict[int, Call] = {}
        self._gradients, self._parameters = RefusedGradients(), Parameters(model)
        self._open = ExitStack()
        self._hooks = saved_tensors_hooks()
        self.dtensors: list[DTensor] = []

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            stack.enter_context(self._gradients)
            stack.enter_context(self._parameters)
            for name, module in self._modules.items():
                stack.callback(_set_class, module, type(module))
                _set_class(module, self._recording(name, type(module)))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        for number in self.calls:
            del _calls[number]

    def _recording(self, name: str, original: type[nn.Module]) -> type[nn.Module]:
        """Return a subclass of the module's class that records calls.

        ``isinstance`` still holds, and the class has the same names, by which models of Hugging Face look it up. Code
        that runs when a class is derived, ``__init_subclass__`` or a metaclass, does not run: it may register classes.
        """

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(name, module, original, args, kwargs)

        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__call__": call}
        derived = type.__new__(type(original), original.__name__, (nn.Module,), dict(names))
        try:
            derived.__bases__ = (original,)
        except TypeError:  # `__slots__` give its instances another layout
            return type.__new__(type(original), original.__name__, (original,), names)
        return derived

    def _call(
        self, name: str, module: nn.Module, kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        number = next(_numbers)
        hooks = saved_tensors_hooks()
        recomputed = hooks != self._hooks and hooks[0].__module__ == checkpoint.__module__
        if hooks != self._hooks and not recomputed:
            raise PassedError(
                f"the model calls {name} ({_class(module)}) under hooks for the tensors that autograd saves, which the "
                "stages would not have: set them in the layer itself, or around the whole step"
            )
        try:
            given, tensors = self.flat((args, kwargs), f"gives {name} ({_class(module)})")
        except TypeError as error:
            raise PassedError(
                f"{name} ({_class(module)}) is given {error}, which is neither a tensor nor a constant: layers on "
                f"other ranks would have another one. {_instead((args, kwargs))}"
            ) from None
        call = Call(
            name, module, kind, self._parameters, given, tensors, autocast_state(), computes_gradients(), recomputed
        )
        self.calls[number] = _calls[number] = call
        self._state.require_same(module)
        self._caches.empty()  # what is traced and what runs below the operator cannot use each other's fake tensors
        with self._gradients.permitted(), self._state.draws.of_whole_module():
            results = WHOLE_MODULE(tensors, number)
        self._caches.empty()
        self._state.note(module)
        returned = self.calls[number].returned
        assert returned is not None
        with self._gradients.permitted(), without_function_modes():
            value = returned.filled(results)
        self.dtensors += _dtensors(value)
        return value

    def flat(self, value: Any, what: str) -> tuple[Flat, list[Tensor]]:
        """Split a value that the model passes on, as `Flat.of` does.

        Args:
            what: what the model does with it, for the error message.

        Raises:
            TypeError: see `Flat.of`.
            PassedError: a DTensor is not one that a module has returned. Operations with DTensors may need collectives,
                whose gradients the tracer would lose.
        """
        for leaf in _dtensors(value):
            if not any(leaf is known for known in self.dtensors):
                raise PassedError(
                    f"the model {what} a DTensor that none of its modules has returned, where the tracer would lose "
                    "gradients: let the module before return a tensor (use_local_output=True), move this into a "
                    "module, or cut without tracing (trace=False)"
                )
        with self._gradients.permitted(), without_function_modes():
            return Flat.of(value)
