"""The forms in which a run trains the one model: who communicates in it, and whether it is compiled.

Every form draws the same weights from the same seed, for any number of ranks. Ranks that share the windows of a step
share each form in a way of ``data_parallel.py``, and its curve has the name of that.

=========  ============================================================================================================
overlap    the collective matmuls of this package
plain      a collective of torch.distributed, then one matmul
compiled   `nn.Linear` and DTensor (``dtensor.py``), compiled with the pass of `symm_overlap.inductor`
eager      the same model, as it is
unsplit    `nn.Linear` (``linears.py``) where no rank shares layers with another, as programs for FSDP are written
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
        name: what a curve is called.
        model: makes this rank's part of the model, on CPU; with a range of pieces, of a stage (see `LanguageModel`).
        compiled: whether it is compiled, with the pass.
        shared: how ranks with other windows share it; None where there are none.
    """

    name: str
    model: Callable[..., LanguageModel]
    compiled: bool = False
    shared: DataParallel | None = None

    def among(self, way: DataParallel) -> Form:
        """The same model, shared in this way."""
        return dataclasses.replace(self, name=way.name, shared=way)

    def wrap(self, model: LanguageModel) -> nn.Module:
        """What runs in place of a model that ``model`` has made, once it is on its device."""
        return model if self.shared is None else self.shared.wrap(model)


def explicit(comm: Collectives) -> Form:
    """The model that calls its collectives itself."""

    def model(config: TrainConfig, pieces: range | None = None) -> LanguageModel:
        draw = FullWeights(config.seed, comm.rank, comm.world)
        dtype = DTYPES[config.dtype]
        return LanguageModel(config.model, config.seq, draw, lambda: Block(config.model, draw, comm), dtype, pieces)

    return Form(comm.name, model)


def dtensor(name: str, group: dist.ProcessGroup, device_type: str, compiled: bool) -> Form:
    """The model that leaves communication to DTensor."""
    from symm_overlap.demo.dtensor import parallel_block  # importing DTensor takes a second, of every command

    def model(config: TrainConfig, pieces: range | None = None) -> LanguageModel:
        draw = FullWeights(config.seed, 0, 1)
        mesh = DeviceMesh.from_group(group, device_type)
        dtype = DTYPES[config.dtype]
        return LanguageModel(
            config.model, config.seq, draw, lambda: parallel_block(config.model, draw, mesh), dtype, pieces
        )

    return Form(name, model, compiled)


def unsplit() -> Form:
    """The model of `nn.Linear`, all of whose layers are here."""
    from symm_overlap.demo.linears import Block as LinearBlock

    def model(config: TrainConfig, pieces: range | None = None) -> LanguageModel:
        draw = FullWeights(config.seed, 0, 1)
        dtype = DTYPES[config.dtype]
        return LanguageModel(config.model, config.seq, draw, lambda: LinearBlock(config.model, draw), dtype, pieces)

    return Form("unsplit", model)


def forms_of(config: TrainConfig, here: Rank) -> list[Form]:
    """The form to train, and with ``compare`` those to hold it against."""
    if here.data is not None:
        found = _shared(config, here, here.data)
    elif config.compile:
        found = [dtensor(name, here.group, config.device, name == "compiled") for name in ("compiled", "eager")]
    else:
        found = [explicit(Overlap(here.group)), explicit(Plain(here.group))]
    return found if config.compare else found[:1]


def _shared(config: TrainConfig, here: Rank, data: dist.ProcessGroup) -> list[Form]:
    """One model, shared in every way there is. Layers that ranks share are not linear layers as torch has them."""
    from symm_overlap.demo.data_parallel import Ddp, Fsdp, OverlapFsdp, ShardedLinears

    sharded = [OverlapFsdp, Fsdp, *([ShardedLinears] if config.tp == 1 else [])]
    form = unsplit() if config.tp == 1 else explicit(Overlap(here.group))
    first, *others = (kind(data, config.device, DTYPES[config.dtype]) for kind in sharded)
    return [form.among(way) for way in (first, Ddp(data), *others)]


def compiled(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model, compiled with the pass."""
    symm_overlap.inductor.clear()
    options = symm_overlap.inductor.options()
    made: Callable[..., torch.Tensor] = torch.compile(model, options=options)
    return made
