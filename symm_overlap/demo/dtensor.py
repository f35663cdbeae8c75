"""Blocks of `nn.Linear` that DTensor splits over ranks, with a plan for `parallelize_module`.

The arithmetic is the same as in ``model.py``, but DTensor issues every collective. Between blocks, each rank holds its
part of the sequence. A block gathers the sequence at its input, and row-wise layers scatter it at their output. Nothing
here calls the ops of this package: ``symm-overlap train --compile`` shows that the compiler pass finds the places by
itself.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from symm_overlap.demo.config import ModelSize
from symm_overlap.demo.linears import Block
from symm_overlap.demo.model import FullWeights


def parallel_block(size: ModelSize, draw: FullWeights, mesh: DeviceMesh) -> nn.Module:
    """Return one block that is split over the ranks of ``mesh``. ``draw`` returns full weights, equal on every rank."""
    plan: dict[str, ParallelStyle] = {
        # The rotary tables, which are the second and third input, stay plain tensors.
        "attention": PrepareModuleInput(
            input_layouts=(Shard(0), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(output_layouts=Shard(0)),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    # Every rank has drawn the same weights, so none needs to be broadcast.
    block: nn.Module = parallelize_module(Block(size, draw), mesh, plan, src_data_rank=None)
    return block
