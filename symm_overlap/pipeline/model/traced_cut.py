"""A model that is cut by tracing: the modules of its stages, and what they run for microbatches of given shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..schedule import Schedule
from ._torch import tree_flatten
from .agreement import LAYERS, SIZES, VALUES
from .batch import Entries
from .begins import Begins, where_modules_are
from .cut import Part, cut
from .layers import is_inside, whole_modules
from .sizes import Costs, Partition, layer_costs, sizes_of
from .skeleton import Skeleton
from .stage_module import Maker, Run, StageModule, Tensors, has, place, run_of
from .trace.flat import Flat
from .trace.tracer import Traced, trace

Finish = Callable[[Any, Tensors], Any]
"""Computes what the last stage returns from what the model returns and from the tensors of the batch."""


class Wanted(NamedTuple):
    """What stages run for.

    Attributes:
        finish: see `Finish`; for the last stage.
        gradients: whether they run in training steps.
        loss_alone: whether only the loss is needed of what the model returns. Then ``finish`` is not called.
    """

    finish: Finish
    gradients: bool
    loss_alone: bool


class TracedCut:
    """See the top of this file.

    Args:
        model: the whole model.
        layers: the names of its layers.
        device: where parameters will be.

    Attributes:
        model: the skeleton of the model.
        sizes: how many calls of layers each stage has; empty before the first batch.
        passed: digests of what the stages passed on in the latest trace.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        device: torch.device,
        schedule: Schedule,
        partition: Partition,
        costs: Costs,
    ) -> None:
        self._skeleton = Skeleton(model, device)
        self.model = self._skeleton.model
        self._layers, self._schedule = layers, schedule
        self._whole = whole_modules(self.model, layers)
        self._spare = {name: module for name, module in whole_modules(model, layers).items() if _is_empty(module)}
        self._partition, self._costs = partition, costs
        self.sizes: tuple[int, ...] = ()
        self.passed = ""
        self._order: tuple[str, ...] = ()
        self._names: list[tuple[str, ...]] = []  # for each stage, what it has

    def modules(self, inputs: Entries, tensors: Tensors) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return for each stage the names of its whole modules, and of its own parameters and buffers.

        Args:
            inputs, tensors: the model's entries and the tensors of one microbatch.

        Raises:
            TraceError, ValueError: the model cannot be cut.
        """
        with self._skeleton.in_use():
            traced = self._trace(inputs, tensors, gradients=True)
            self._order = _layers_of(traced)
            costs = layer_costs(self._costs, traced, self._skeleton)
            self.sizes = sizes_of(self._partition, self._order, self._schedule, costs)
            names = [self._names_of(part) for part in self._parts(traced)]
        self._names = [(*modules, *attributes) for modules, attributes in names]
        return names

    @property
    def agreed(self) -> dict[str, object]:
        """What must be the same on all ranks, after the first trace."""
        return {SIZES: self.sizes, LAYERS: ", ".join(self._order), VALUES: self.passed}

    def _parts(self, traced: Traced, outputs: Sequence[int] | None = None, begins: Begins | None = None) -> list[Part]:
        parts = cut(traced, self.sizes, outputs, begins)
        self.passed = " ".join(part.returned for part in parts[:-1])
        return parts

    def _names_of(self, part: Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `modules`. For a parameter that a whole module owns, the module is listed: it can initialise the
        parameter."""
        owners = {name: [whole for whole in self._whole if is_inside(name, whole)] for name in part.attributes}
        modules = dict.fromkeys([*part.modules, *(whole for found in owners.values() for whole in found)])
        return tuple(modules), tuple(name for name, found in owners.items() if not found)

    def runs(
        self, stages: dict[int, StageModule], inputs: Entries, tensors: Tensors, wanted: Wanted
    ) -> dict[int, Maker]:
        """Return what makes the functions that stages of this rank run for microbatches of these shapes.

        Args:
            stages: the stages by their index in the pipeline.
            wanted: what they run for.

        Raises:
            TraceError, ValueError: the model cannot be traced, or a stage would have to call modules that it does not
                have.
        """
        with self._skeleton.in_use():
            traced = self._trace(inputs, tensors, wanted.gradients)
            same = _layers_of(traced) == self._order
            begins = None if same else where_modules_are(traced, self._names, self._spare.keys())
            outputs = [_index_of_loss(traced)] if wanted.loss_alone else None
        parts = self._parts(traced, outputs, begins)
        self._require_names(parts)
        found: dict[int, Maker] = {}
        for index, stage in stages.items():
            part = parts[index]
            self._complete(stage, part)
            if part is not parts[-1]:
                found[index] = _maker(part, _between)
            elif wanted.loss_alone:
                found[index] = _maker(part, _first)
            else:
                found[index] = _maker(part, partial(_last, returned=traced.returned, finish=wanted.finish))
        return found

    def _trace(self, inputs: Entries, tensors: Tensors, gradients: bool) -> Traced:
        given = {name: tensors[name] for name in inputs.names}
        return trace(self._skeleton, self._whole, self._layers, inputs.flat, given, gradients)

    def _complete(self, stage: StageModule, part: Part) -> None:
        """Add modules without parameters that the first batch did not need, such as dropout after an evaluation."""
        for name in part.modules:
            if name in self._spare and not has(stage, name):
                place(stage, name, self._spare[name].train(stage.training))

    def _require_names(self, parts: Sequence[Part]) -> None:
        """Check all stages, also those of other ranks, so that all ranks raise the same error.

        Raises:
            ValueError: a stage does not have what it needs.
        """
        for part, names in zip(parts, self._names, strict=True):
            for name in (*part.modules, *part.attributes):
                if name in self._spare or any(is_inside(name, other) for other in names):
                    continue
                raise ValueError(
                    f"with this batch the model calls {name} in a stage that does not have it: with the first batch, "
                    "nothing in that stage needed it. Pass build() a batch with which all modules are called, and call "
                    "it in the mode, train() or eval(), in which they are"
                )


def _layers_of(traced: Traced) -> tuple[str, ...]:
    return tuple(traced.calls[node].name for node in traced.layers)


def _is_empty(module: nn.Module) -> bool:
    return not any(True for _ in (*module.parameters(), *module.buffers()))


def _index_of_loss(traced: Traced) -> int:
    """Return the index of the loss among the tensors that a model returns.

    Raises:
        ValueError: none is the loss.
    """
    (returned,) = next(node for node in traced.graph.nodes if node.op == "output").args
    values = [node.meta["val"] for node in returned]
    whole = traced.returned.filled(values)  # with DTensors in place of the ranks' parts
    tensors = [leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor)]
    found = loss_in(whole)
    return next(index for index, tensor in enumerate(tensors) if tensor is found)


def loss_in(returned: Any) -> Tensor:
    """Return the loss in what a model returns: a tensor of one number, or such a tensor as ``.loss`` or under "loss".

    Raises:
        ValueError: there is none.
    """
    found = returned
    if not isinstance(found, Tensor):
        found = returned.get("loss") if isinstance(returned, dict) else getattr(returned, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = (
            f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(returned).__name__}"
        )
        raise ValueError(
            f"the model returns {what} without a loss: give loss=, a function of what the model returns and of a "
            "target, or a batch with which the model computes its loss (labels). If the loss is somewhere in what the "
            "model returns, give loss=lambda output: output[1], for example, and target=None"
        )
    return found


def _maker(part: Part, returning: Callable[[Run], Run]) -> Maker:
    return lambda stage: returning(run_of(part, stage))


def _between(run: Callable[[Sequence[Tensor], Tensors], list[Tensor]]) -> Run:
    def stage(received: Sequence[Tensor], tensors: Tensors) -> Tensor | tuple[Tensor, ...]:
        results = run(received, tensors)
        return results[0] if len(results) == 1 else tuple(results)

    return stage


def _first(run: Callable[[Sequence[Tensor], Tensors], list[Tensor]]) -> Run:
    return lambda received, tensors: run(received, tensors)[0]


def _last(run: Callable[[Sequence[Tensor], Tensors], list[Tensor]], returned: Flat, finish: Finish) -> Run:
    return lambda received, tensors: finish(returned.filled(run(received, tensors)), tensors)
