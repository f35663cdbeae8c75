"""The modes of code between layers: blocks such as ``with torch.no_grad()`` and ``with torch.autocast(...)``.

torch.export records where a block begins and ends. Then it makes one operator of the block, which could not be cut, and
loses blocks without gradients inside of autocast. So that is left out, and every node notes in which modes it runs.

Calls of ``torch.set_grad_enabled`` do not say everything: C++ code disables gradients too, around the forward of a
``torch.autograd.Function``, around hooks of a checkpoint, and in ``torch.inference_mode()``. So the mode is read before
each operator, and recorded if it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from .._torch import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS, without_function_modes
from ..environment import Autocast, computes_gradients
from .calls import WHOLE_MODULE, Call
from .error import TraceError


@dataclass(frozen=True)
class Modes:
    """The modes in which code runs, as far as the model sets them.

    Attributes:
        gradients: whether it computes gradients.
        autocasts: for each block of `torch.autocast`, the outermost first, its device, its dtype, and whether it is
            enabled. They use the cache, which torch.export disables.
    """

    gradients: bool | None = None
    autocasts: tuple[tuple[Any, ...], ...] = ()

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function in these modes."""
        if self.autocasts:
            with torch.autocast(*self.autocasts[0]):
                return Modes(self.gradients, self.autocasts[1:]).run(function)
        if self.gradients is None:
            return function()
        with torch.set_grad_enabled(self.gradients):
            return function()


_NONE = Modes()


def modes_of(node: fx.Node) -> Modes:
    """Return in which modes a node runs."""
    found: Modes = node.meta.get("modes", _NONE)
    return found


def note_modes(graph: fx.Graph, calls: Mapping[int, Call], gradients: bool, autocast: Autocast) -> None:
    """Let the nodes of a graph note in which modes they run, and remove those that begin and end blocks.

    Args:
        calls: the calls of whole modules, by their number in the graph.
        gradients, autocast: whether gradients are computed where the graph begins, and the state of autocast.

    Raises:
        TraceError: a whole module has been called in another mode than the graph says.
    """
    now = gradients
    autocasts: dict[fx.Node, tuple[Any, ...]] = {}
    noted: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is SET_GRADIENTS:
            now = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            autocasts[node] = tuple(node.args[:3])
        elif node.target is EXIT_AUTOCAST:
            del autocasts[node.args[0]]
        else:
            node.meta["modes"] = Modes(None if now == gradients else now, tuple(autocasts.values()))
            if node.target is WHOLE_MODULE:
                _require_same(calls[node.args[1]], now, _with_blocks(autocast, autocasts.values()))
            continue
        noted.append(node)
    for node in reversed(noted):
        graph.erase_node(node)


def _with_blocks(autocast: Autocast, blocks: Iterable[tuple[Any, ...]]) -> Autocast:
    """Return the state of autocast in blocks."""
    dtypes = dict(autocast)
    for device, dtype, enabled in blocks:
        dtypes.pop(device, None)
        dtypes.update({device: dtype} if enabled else {})
    return tuple(sorted(dtypes.items()))


def _require_same(call: Call, gradients: bool, autocast: Autocast) -> None:
    what = ""
    if call.autocast != autocast:
        what = "under autocast" if call.autocast else "without autocast"
    if call.gradients != gradients:
        what = "with gradients" if call.gradients else "without gradients"
    if what:
        raise TraceError(
            f"the model calls {call.name} {what} in a way that torch.export does not record: use a block of "
            "torch.no_grad() or torch.autocast(), move this into a module that has no layers inside, or cut without "
            "tracing (trace=False)"
        )


class GradientsRecorded(TorchFunctionMode):
    """Let torch.export record in its graph whether operators compute gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded = computes_gradients()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`. What is called in here is seen by torch.export alone."""
        if function is SET_GRADIENTS:
            with without_function_modes():
                return function(*args)
        if computes_gradients() != self._recorded:
            self._recorded = not self._recorded
            SET_GRADIENTS(self._recorded)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class InModes:
    """The target of a node that runs another target in modes."""

    target: Callable[..., Any]
    modes: Modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.modes.run(partial(self.target, *args, **kwargs))

    __name__ = "in_modes"


def run_in_modes(node: fx.Node) -> None:
    """Let a node run in its modes when its graph runs."""
    if (modes := modes_of(node)) != _NONE:
        assert callable(node.target)
        node.target = InModes(node.target, modes)
