"""Run the stages of a model one after the other in one process, to test the cut without a runtime."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model.batch import Batch
from symm_overlap.pipeline.model.cut import Part, cut
from symm_overlap.pipeline.model.layers import layers_of, whole_modules
from symm_overlap.pipeline.model.skeleton import Skeleton
from symm_overlap.pipeline.model.stage_module import StageModule, has, place, run_of
from symm_overlap.pipeline.model.trace.tracer import Traced, trace


def traced(model: nn.Module, batch: dict[str, Any], **layers: Any) -> tuple[Traced, Skeleton, dict[str, Tensor]]:
    """Return a model's graph, its skeleton, and the tensors of the batch by name."""
    skeleton = Skeleton(model, torch.device("cpu"))
    names = layers_of(model, layers.get("layer_cls"), layers.get("layer_names"))
    read = Batch.of(batch, None, {}, 1)
    tensors = {**read.microbatches(1)[0], **read.shared}
    ordered = {name: tensors[name] for name in read.inputs.names}
    whole = whole_modules(skeleton.model, names)
    return trace(skeleton, whole, names, read.inputs.flat, ordered), skeleton, ordered


class Stages:
    """A model that is cut into stages of the given sizes, which run one after the other."""

    def __init__(self, model: nn.Module, batch: dict[str, Any], sizes: Sequence[int], **layers: Any) -> None:
        found, _, self.tensors = traced(model, batch, **layers)
        self.returned = found.returned
        self.parts: list[Part] = cut(found, sizes)
        self.modules: list[StageModule] = []
        self.sent: list[list[Tensor]] = []
        for part in self.parts:
            stage = StageModule()
            for name in part.modules:
                place(stage, name, model.get_submodule(name))
            for name in part.attributes:
                if not has(stage, name):
                    place(stage, name, operator.attrgetter(name)(model))
            self.modules.append(stage)

    def __call__(self) -> Any:
        """Return what the model returns. ``sent`` then has what every stage passed to the next one."""
        received: list[Tensor] = []
        self.sent.clear()
        for part, stage in zip(self.parts, self.modules, strict=True):
            assert len(received) == part.received
            received = run_of(part, stage)(received, self.tensors)
            self.sent.append(received)
        return self.returned.filled(self.sent.pop())
