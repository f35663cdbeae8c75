"""The part of a model that is on a rank."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..runtime import Stage
from ..runtime.equal_copies import make_copies_equal
from ..schedule import Schedule
from .stage_module import StageModule, has, place, runs_of
from .tied import Tied, all_names, names_of_part, tied
from .values import Init, materialize, sharded_as


class Parts:
    """The stages of a rank. They are created once it is known which modules each stage has.

    Args:
        model: the whole model; released once the stages are created.
        wanted: the device that all stages are moved to, or None to leave them where they are.
        device: where tensors on the meta device go.
        init, state_dict: where tensors on the meta device get values from.

    Attributes:
        tied: see `PipelineRuntime`.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        rank: int,
        wanted: torch.device | None,
        device: torch.device,
        init: Init | None,
        state_dict: Mapping[str, Tensor] | None,
    ) -> None:
        self._model: nn.Module | None = model
        self._schedule, self._own = schedule, schedule.stages_of_ranks[rank]
        self._wanted, self._device = wanted, device
        self._init, self._state_dict = init, state_dict
        self._names = all_names(model)
        self._stages: list[tuple[Stage, StageModule]] = []
        self._mode: bool | None = None
        self.tied: Tied = ()

    @property
    def built(self) -> bool:
        """True if the stages have been created."""
        return bool(self._stages)

    @property
    def stages(self) -> list[Stage]:
        """The stages of this rank."""
        return [stage for stage, _ in self.modules()]

    def require(self) -> None:
        """Raise RuntimeError if the stages have not been created."""
        if not self.built:
            raise RuntimeError(
                "the model is cut with its first batch, and there was none yet: call build(**batch), for example "
                "before you create an optimizer"
            )

    def modules(self) -> list[tuple[Stage, StageModule]]:
        """Return the stages of this rank and their modules."""
        self.require()
        return self._stages

    def build(self, names: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], skeleton: nn.Module) -> None:
        """Create the stages.

        Args:
            names: for each stage of the pipeline, the names of its modules, and of its own parameters and buffers.
            skeleton: a model with the same names and ties, whose parameters may be fake.

        Raises:
            ValueError: a parameter on the meta device gets no value.
        """
        model = self._model
        assert model is not None
        modules: list[StageModule] = []
        for index in self._own:
            stage = StageModule()
            runs_of(stage).earlier = tuple(modules)
            inside, attributes = names[index]
            for name in sorted(inside, key=lambda name: name.count(".")):
                if not has(stage, name):
                    place(stage, name, model.get_submodule(name))
            for name in attributes:
                if not has(stage, name):
                    persistent = name in model.state_dict()
                    place(stage, name, operator.attrgetter(name)(model), persistent)
            stage.training = model.training
            modules.append(stage)
        materialize(modules, self._device, self._init, self._state_dict, self._names)
        if self._wanted is not None:
            for stage in modules:
                stage.to(self._wanted)
        parameters = [names_of_part(inside, attributes, skeleton) for inside, attributes in names]
        self.tied = tied(parameters)
        _warn_of_unused(skeleton, parameters)
        self._stages = [(Stage(module, index), module) for index, module in zip(self._own, modules, strict=True)]
        self._model = self._state_dict = self._init = None  # the function may be a method of the model
        if self._mode is not None:
            self.train(self._mode, skeleton)

    def make_copies_equal(self, group: dist.ProcessGroup | None) -> None:
        """Give the copies of tied parameters equal values: each rank has initialised its own. Collective."""
        make_copies_equal(self._schedule, self.stages, self.tied, group, self._device)

    def train(self, mode: bool, skeleton: nn.Module) -> None:
        """Call ``module.train(mode)`` for all stages, now or once they are created.

        Args:
            skeleton: a model with the same names, which is in this mode already. Its modules may be in another mode,
                since a module around the layers may have its own ``train`` (frozen batch norms).
        """
        self._mode = mode
        modes = {name: module.training for name, module in skeleton.named_modules(remove_duplicate=False)}
        for _, stage in self._stages:
            stage.train(mode)
            for name, module in stage.named_modules(remove_duplicate=False):
                module.training = modes.get(name, module.training)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names, each once."""
        for _, module in self.modules():
            yield from module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of all stages together, with all names of tied parameters."""
        found = {name: value for _, module in self.modules() for name, value in module.state_dict().items()}
        return {other: value for name, value in found.items() for other in (name, *self._names.get(name, ()))}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """See `PipelineModel.load_state_dict`."""
        for _, module in self.modules():
            wanted = {}
            for name, own in module.state_dict().items():
                found = next((key for key in (name, *self._names.get(name, ())) if key in state_dict), None)
                if found is not None:
                    wanted[name] = sharded_as(own, state_dict[found])
            module.load_state_dict(wanted, strict=strict)


def _warn_of_unused(model: nn.Module, parameters: Sequence[Mapping[str, nn.Parameter]]) -> None:
    used = {id(parameter) for stage in parameters for parameter in stage.values()}
    unused = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    if unused:
        warnings.warn(
            f"{len(unused)} parameters were not used with the first batch, and no stage has them: "
            f"{', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}",
            stacklevel=4,
        )
