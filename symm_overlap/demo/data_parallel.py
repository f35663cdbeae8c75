"""How ranks that train on different windows share one model: who keeps its parameters, and when they travel.

Each way wraps a model, after which its forward and backward passes leave the mean over these ranks in the gradients.
All of them start from the same weights on every rank.

=======  ==============================================================================================================
overlap  every rank keeps a shard of each block, which is gathered when it is used (`fully_shard`), with the
         communication, the prefetch and the event after the optimizer of `symm_overlap.fsdp`
fsdp2    the same with those of torch
ddp      every rank keeps all of the model, and gradients are averaged (`DistributedDataParallel`)
linears  every linear layer is a `symm_overlap.fsdp.ShardedLinear`, which never gathers its weight; the rest as overlap
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
    """One way to share a model; ``name`` is what its curve is called."""

    name: str

    def wrap(self, model: LanguageModel) -> nn.Module:
        """The module to run in place of ``model``, whose parameters may be others from here on."""
        raise NotImplementedError

    def plan(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        """Set up when parameters travel, of a module that decides it itself; what to print about that in the end."""
        return None


class Ddp(DataParallel):
    """`DistributedDataParallel`, as thrifty as it can be: gradients lie in the buckets that are reduced."""

    name = "ddp"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def wrap(self, model: LanguageModel) -> nn.Module:
        with warnings.catch_warnings():
            # torch 2.13 has another name for broadcast_buffers, which torch 2.11 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model, process_group=self._group, gradient_as_bucket_view=True, broadcast_buffers=False
            )


class Fsdp(DataParallel):
    """`fully_shard` on every block and on the rest, with the communication and the prefetch that torch has.

    Parameters travel in the dtype of the model, gradients in float32.
    """

    name = "fsdp2"

    def __init__(self, group: dist.ProcessGroup, device_type: str, dtype: torch.dtype) -> None:
        self._mesh = DeviceMesh.from_group(group, device_type)
        # What blocks take beside the activations, cosines and sines, stays in float32.
        self._policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )

    def wrap(self, model: LanguageModel) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy)
        return model


class OverlapFsdp(Fsdp):
    """The same with the communication of this package, and with prefetch that is planned from a recorded step."""

    name = "overlap"

    def wrap(self, model: LanguageModel) -> nn.Module:
        super().wrap(model)
        fsdp.apply(model)
        return model

    def plan(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        fsdp.post_optimizer_event(optimizer, module)
        return fsdp.plan_prefetch(module, "auto", verbose=False)


class ShardedLinears(Fsdp):
    """Linear layers that take their weight as it arrives; the rest, which is small, is gathered once a step."""

    name = "linears"

    def wrap(self, model: LanguageModel) -> nn.Module:
        fsdp.shard_linears(model, self._mesh)
        layers = [module for module in model.modules() if isinstance(module, fsdp.ShardedLinear)]
        sharded = {parameter for layer in layers for parameter in layer.parameters()}
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy, ignored_params=sharded)
        fsdp.apply(model)
        return model
