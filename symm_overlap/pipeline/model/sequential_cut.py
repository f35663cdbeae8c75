"""A model that is cut without tracing: its layers are called one after another.

``first`` modules are called before them and ``last`` modules after them. Each module receives what the previous one
returned. The first one receives the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..schedule import Schedule
from .agreement import SIZES
from .batch import Entries
from .layers import is_inside, names_that_fit
from .memory import sharing
from .sizes import Costs, Partition, given_costs, size_of, sizes_of
from .skeleton import Skeleton
from .stage_module import Maker, Run, StageModule, Tensors
from .traced_cut import Wanted, loss_in

Names = str | Sequence[str]


class SequentialCut:
    """See the top of this file. It has the interface of `TracedCut`.

    Args:
        model: the whole model.
        layers, first, last: names of modules, in the order in which they are called.
        kwargs_of: for names of modules, in which ``*`` matches anything but a dot, the entries of the batch that they
            get by keyword. All other entries go to the first module, in their order.

    Raises:
        ValueError: there is no module with a given name, or costs do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        schedule: Schedule,
        partition: Partition,
        costs: Costs,
        first: Names = (),
        last: Names = (),
        kwargs_of: Mapping[str, Names] | None = None,
    ) -> None:
        self.model = _skeleton_of(model)
        before, behind = _listed(first), _listed(last)
        for name in (*before, *behind):
            if name not in dict(model.named_modules()):
                raise ValueError(f"{type(model).__name__} has no module {name!r}, which first or last names")
        names = [*before, *layers, *behind]
        self._kwargs_of: dict[str, tuple[str, ...]] = {}
        for pattern, entries in (kwargs_of or {}).items():
            fitting = names_that_fit(pattern, names)
            if not fitting:
                raise ValueError(f"kwargs_of names {pattern!r}, which is not one of {', '.join(names)}")
            for name in fitting:
                self._kwargs_of[name] = (*self._kwargs_of.get(name, ()), *_listed(entries))
        self.sizes = sizes_of(partition, layers, schedule, _costs(model, layers, before, behind, costs))
        self.passed = ""
        self._names: list[list[str]] = []
        start = 0
        for size in self.sizes:
            self._names.append(list(layers[start : start + size]))
            start += size
        self._names[0][:0] = before
        self._names[-1] += behind
        self._common = _common(self._names, sharing(model))

    @property
    def agreed(self) -> dict[str, object]:
        """See `TracedCut.agreed`."""
        return {SIZES: self.sizes}

    def modules(self, inputs: Entries, tensors: Tensors) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """See `TracedCut.modules`."""
        return [(tuple(dict.fromkeys(names)), ()) for names in self._names]

    def runs(
        self, stages: dict[int, StageModule], inputs: Entries, tensors: Tensors, wanted: Wanted
    ) -> dict[int, Maker]:
        """See `TracedCut.runs`."""
        return {index: partial(self._run, index, inputs, wanted) for index in stages}

    def _run(self, index: int, inputs: Entries, wanted: Wanted, stage: StageModule) -> Run:
        names, is_last = self._names[index], index == len(self._names) - 1
        by_keyword = {entry for entries in self._kwargs_of.values() for entry in entries}

        def run(received: Sequence[Tensor], tensors: Tensors) -> Any:
            batch = inputs.filled(tensors)
            if missing := by_keyword - batch.keys():
                raise ValueError(f"kwargs_of names {', '.join(sorted(missing))}, which the batch does not have")
            value: Any = tuple(received)
            if index == 0:
                value = tuple(entry for name, entry in batch.items() if name not in by_keyword)
            before = _versions(stage, self._common[index])
            for name in names:
                given = value if isinstance(value, tuple) else (value,)
                kwargs = {entry: batch[entry] for entry in self._kwargs_of.get(name, ())}
                value = stage.get_submodule(name)(*given, **kwargs)
            for name, version in _versions(stage, self._common[index]).items():
                if version != before[name]:
                    raise RuntimeError(
                        f"stage {index} changes the buffer {name}, which another stage has too: each has a copy of its "
                        "own, and does not see the changes of others. Use it in one layer alone, or cut elsewhere"
                    )
            if not is_last:
                return value
            return loss_in(value) if wanted.loss_alone else wanted.finish(value, tensors)

        return run


def _common(names: Sequence[Sequence[str]], sharing: Mapping[str, set[str]]) -> list[list[str]]:
    """Return for each stage, of which ``names`` has the modules, its tensors of which another stage has a part."""
    held = [{each for each in sharing if any(is_inside(each, name) for name in found)} for found in names]
    return [
        [each for each in mine if any(not sharing[each].isdisjoint(other) for other in held if other is not mine)]
        for mine in held
    ]


def _versions(stage: StageModule, names: Sequence[str]) -> dict[str, int]:
    """Return how often each of these buffers was written to."""
    buffers = dict(stage.named_buffers(remove_duplicate=False)) if names else {}
    return {name: buffers[name]._version for name in names if name in buffers and not buffers[name].is_inference()}


def _skeleton_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model without memory, so that a rank keeps only its own part; or the model if it cannot be
    copied."""
    try:
        return Skeleton(model, torch.device("cpu")).model
    except (TypeError, RuntimeError, NotImplementedError):
        return model


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _costs(model: nn.Module, layers: Sequence[str], before: Sequence[str], behind: Sequence[str], costs: Costs) -> Any:
    if costs in ("flops", "parameters"):  # nothing is run here, so only parameters can be counted
        numbers = [size_of(model.get_submodule(name)) for name in layers]
        numbers[0] += sum(size_of(model.get_submodule(name)) for name in before)
        numbers[-1] += sum(size_of(model.get_submodule(name)) for name in behind)
        return given_costs(numbers, len(layers))
    return given_costs(costs, len(layers))
