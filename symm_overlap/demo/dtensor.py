"""Blocks of `nn.Linear` that DTensor splits over ranks: a plan for `parallelize_module`.

The arithmetic is that of ``model.py``, but every collective is DTensor's. A rank holds its part of the sequence between
blocks; a block gathers the sequence on its way in, and row-wise layers scatter it on their way out. Nothing here knows
the ops of this package: ``symm-overlap train --compile`` shows that its compiler pass finds them by itself.
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
    """One block, split over the ranks of ``mesh``; ``draw`` hands out full weights, the same ones on every rank."""
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
    # Every rank has drawn the same weights, so that none has to be sent.
    block: nn.Module = parallelize_module(Block(size, draw), mesh, plan, src_data_rank=None)
    return block
