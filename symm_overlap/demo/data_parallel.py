"""How ranks that train on different windows share one model: which rank keeps which parameters, and when they are sent.

Each way wraps a model. After that, the forward and backward passes leave the mean over these ranks in the gradients.
Each way starts from the same weights on every rank.

=======  ==============================================================================================================
overlap  every rank keeps a shard of each block, and the block is gathered when it is used (`fully_shard`), with the
         communication, the prefetch and the event after the optimizer of `symm_overlap.fsdp`
fsdp2    the same, with the communication and the prefetch of torch
ddp      every rank keeps the whole model, and gradients are averaged (`DistributedDataParallel`)
linears  every linear layer is a `symm_overlap.fsdp.ShardedLinear`, which never gathers its weight; the remaining
         parameters use the communication of `symm_overlap.fsdp`
=======  ==============================================================================================================
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from symm_overlap import fsdp
from symm_overlap.demo.model import LanguageModel


class DataParallel:
    """One way to share a model. ``name`` is the name of its curve."""

    name: str

    def wrap(self, model: LanguageModel) -> nn.Module:
        """Return the module to run in place of ``model``. This call may replace the parameters of ``model``."""
        raise NotImplementedError

    def plan(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        """Plan when the parameters of ``module`` are gathered, if this way has such a plan.

        Returns the plan, which is printed at the end of the run, or None.
        """
        return None


class Ddp(DataParallel):
    """`DistributedDataParallel` with the least memory it can use: gradients are views into the buckets it reduces."""

    name = "ddp"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def wrap(self, model: LanguageModel) -> nn.Module:
        with warnings.catch_warnings():
            # torch 2.13 has a new name for broadcast_buffers, but torch 2.11 knows only the old one.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model, process_group=self._group, gradient_as_bucket_view=True, broadcast_buffers=False
            )


class Fsdp(DataParallel):
    """`fully_shard` on every block and on the rest of the model, with torch's own communication and prefetch.

    Parameters are gathered in the dtype of the model, and gradients are reduced in float32.
    """

    name = "fsdp2"

    def __init__(self, group: dist.ProcessGroup, device_type: str, dtype: torch.dtype) -> None:
        self._mesh = DeviceMesh.from_group(group, device_type)
        # The other inputs of blocks, cosines and sines, must stay in float32, so forward inputs are not cast.
        self._policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )

    def wrap(self, model: LanguageModel) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy)
        return model


class OverlapFsdp(Fsdp):
    """`fully_shard` with the communication of this package, and with prefetch that is planned from a recorded step."""

    name = "overlap"

    def wrap(self, model: LanguageModel) -> nn.Module:
        super().wrap(model)
        fsdp.apply(model)
        return model

    def plan(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        fsdp.post_optimizer_event(optimizer, module)
        return fsdp.plan_prefetch(module, "auto", verbose=False)


class ShardedLinears(Fsdp):
    """Linear layers that use each part of their weight when it arrives. The rest of the model is small and is gathered
    once a step."""

    name = "linears"

    def wrap(self, model: LanguageModel) -> nn.Module:
        fsdp.shard_linears(model, self._mesh)
        layers = [module for module in model.modules() if isinstance(module, fsdp.ShardedLinear)]
        sharded = {parameter for layer in layers for parameter in layer.parameters()}
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy, ignored_params=sharded)
        fsdp.apply(model)
        return model
