"""The forms in which a run trains the one model: who communicates in it, and whether it is compiled.

Every form draws the same weights from the same seed, for any number of ranks.

=========  ============================================================================================================
overlap    the collective matmuls of this package
plain      a collective of torch.distributed, then one matmul
compiled   `nn.Linear` and DTensor (``dtensor.py``), compiled with the pass of `symm_overlap.inductor`
eager      the same model, as it is
=========  ============================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import symm_overlap
from symm_overlap.demo.collectives import Overlap, Plain
from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.model import Block, Collectives, FullWeights, LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Form:
    """One way to run the model.

    Attributes:
        name: what a curve is called.
        model: makes this rank's part of the model, on CPU; with a range of pieces, of a stage (see `LanguageModel`).
        compiled: whether it is compiled, with the pass.
    """

    name: str
    model: Callable[..., LanguageModel]
    compiled: bool = False


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


def forms_of(config: TrainConfig, group: dist.ProcessGroup, device_type: str) -> list[Form]:
    """The form to train, and with ``compare`` the one to hold it against."""
    if config.compile:
        found = [dtensor(name, group, device_type, name == "compiled") for name in ("compiled", "eager")]
    else:
        found = [explicit(Overlap(group)), explicit(Plain(group))]
    return found if config.compare else found[:1]


def compiled(model: LanguageModel) -> Callable[..., torch.Tensor]:
    """The model, compiled with the pass."""
    symm_overlap.inductor.clear()
    options = symm_overlap.inductor.options()
    made: Callable[..., torch.Tensor] = torch.compile(model, options=options)
    return made
