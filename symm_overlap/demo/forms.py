"""The forms in which a run can train the model: which code issues the collectives, and whether the model is compiled.

Every form draws the same weights from the same seed, for any number of ranks. If ranks share the windows of a step,
they share each form in one of the ways of ``data_parallel.py``, and the curve has the name of that way.

=========  ============================================================================================================
overlap    the collective matmuls of this package
plain      a collective of torch.distributed before or after one matmul
compiled   `nn.Linear` and DTensor (``dtensor.py``), compiled with the pass of `symm_overlap.inductor`
eager      the model of ``compiled``, not compiled
unsplit    `nn.Linear` (``linears.py``) for ranks that hold whole layers, as in ordinary programs for FSDP
=========  ============================================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import symm_overlap
from symm_overlap.demo.collectives import Overlap, Plain
from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.model import Block, Collectives, FullWeights, LanguageModel
from symm_overlap.demo.rank import Rank

if TYPE_CHECKING:
    from symm_overlap.demo.data_parallel import DataParallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Form:
    """One way to run the model.

    Attributes:
        name: the name of the curve.
        model: creates this rank's part of the model on CPU. With a range of pieces, it creates this rank's part of a
            pipeline stage (see `LanguageModel`).
        compiled: whether the model is compiled with the pass.
        shared: how ranks that train on different windows share the model; None if all ranks train on the same windows.
    """

    name: str
    model: Callable[..., LanguageModel]
    compiled: bool = False
    shared: DataParallel | None = None

    def among(self, way: DataParallel) -> Form:
        """Return this form, shared between data-parallel ranks in this way."""
        return dataclasses.replace(self, name=way.name, shared=way)

    def wrap(self, model: LanguageModel) -> nn.Module:
        """Return the module to run in place of a model that `model` has created and that is on its device."""
        return model if self.shared is None else self.shared.wrap(model)


def explicit(comm: Collectives) -> Form:
    """Return the form in which the model calls its collectives itself."""

    def model(config: TrainConfig, pieces: range | None = None) -> LanguageModel:
        draw = FullWeights(config.seed, comm.rank, comm.world)
        dtype = DTYPES[config.dtype]
        return LanguageModel(config.model, config.seq, draw, lambda: Block(config.model, draw, comm), dtype, pieces)

    return Form(comm.name, model)


def dtensor(name: str, group: dist.ProcessGroup, device_type: str, compiled: bool) -> Form:
    """Return the form in which DTensor issues the communication."""
    from symm_overlap.demo.dtensor import parallel_block  # at the top, it would cost every command a second

    def model(config: TrainConfig, pieces: range | None = None) -> LanguageModel:
        draw = FullWeights(config.seed, 0, 1)
        mesh = DeviceMesh.from_group(group, device_type)
        dtype = DTYPES[config.dtype]
        return LanguageModel(
            config.model, config.seq, draw, lambda: parallel_block(config.model, draw, mesh), dtype, pieces
        )

    return Form(name, model, compiled)


def unsplit() -> Form:
    """Return the form with `nn.Linear` in which this rank has the whole of every layer."""
    from symm_overlap.demo.linears import Block as LinearBlock

    def model(config: TrainConfig, pieces: range | None = None) -> LanguageModel:
        draw = FullWeights(config.seed, 0, 1)
        dtype = DTYPES[config.dtype]
        return LanguageModel(config.model, config.seq, draw, lambda: LinearBlock(config.model, draw), dtype, pieces)

    return Form("unsplit", model)


def forms_of(config: TrainConfig, here: Rank) -> list[Form]:
    """Return the form to train, followed by the forms to compare it with if ``compare`` is set."""
    if here.data is not None:
        found = _shared(config, here, here.data)
    elif config.compile:
        found = [dtensor(name, here.group, config.device, name == "compiled") for name in ("compiled", "eager")]
    else:
        found = [explicit(Overlap(here.group)), explicit(Plain(here.group))]
    return found if config.compare else found[:1]


def _shared(config: TrainConfig, here: Rank, data: dist.ProcessGroup) -> list[Form]:
    """Return one model, shared in every possible way.

    `ShardedLinears` needs layers of `nn.Linear`, which the model does not have if ranks share its layers.
    """
    from symm_overlap.demo.data_parallel import Ddp, Fsdp, OverlapFsdp, ShardedLinears

    sharded = [OverlapFsdp, Fsdp, *([ShardedLinears] if config.tp == 1 else [])]
    form = unsplit() if config.tp == 1 else explicit(Overlap(here.group))
    first, *others = (kind(data, config.device, DTYPES[config.dtype]) for kind in sharded)
    return [form.among(way) for way in (first, Ddp(data), *others)]


def compiled(model: nn.Module) -> Callable[..., torch.Tensor]:
    """Compile the model with the pass of `symm_overlap.inductor`."""
    symm_overlap.inductor.clear()
    options = symm_overlap.inductor.options()
    made: Callable[..., torch.Tensor] = torch.compile(model, options=options)
    return made
