"""``ShardedLinear``: a linear layer whose weight is sharded over the ranks and never gathered as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...collective import all_gather, all_gather_weight_matmul
from ...collective.arguments import Group, group_name
from ...custom_gradient import apply
from .shards import Mean, mesh_of, pad, padded_shard, shard_size, sharded


class ShardedLinear(nn.Module):
    """``nn.Linear`` for data parallelism, with the weight sharded over the ranks. Equivalent to this on every rank::

        weight, bias = all_gather(weight_shard, shard_dim, group), all_gather(bias_shard, 0, group)
        return F.linear(x, weight, bias)

    and to averaging the gradients of both over the ranks, where each rank keeps its shard. The weight is consumed shard
    by shard (`symm_overlap.all_gather_weight_matmul`, forward and backward), so no rank ever holds all of it.

    The parameters are DTensors with the names, shapes and values of the parameters of ``nn.Linear``. ``weight`` is
    sharded along ``shard_dim`` and ``bias`` along 0, like ``torch.chunk`` and FSDP2 do it. Sizes need not be divisible
    by the number of ranks: a rank whose shard is short pads it at every call. ``load_state_dict`` accepts whole tensors
    and DTensors. ``torch.distributed.checkpoint`` saves and loads the shards.

    Args:
        in_features, out_features, bias, dtype: as for ``nn.Linear``.
        group: the data-parallel ranks: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        shard_dim: 0: each rank has some outputs of the layer. 1: each rank has some inputs, and partial products are
            summed.
        device: as for ``nn.Linear``. "meta" needs a DeviceMesh; call ``to_empty`` and ``reset_parameters`` later.

    Input (..., in_features) with any number of rows, which may differ between ranks; output (..., out_features).
    dtypes: float32, float64, bfloat16, float16. Under autocast, the shards are cast before they are sent, and gradients
    are accumulated in the dtype of the parameters.

    Raises:
        ValueError: ``shard_dim`` is neither 0 nor 1, or the group has several dimensions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        shard_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(linear, mesh_of(group, linear.weight), shard_dim)

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group, *, shard_dim: int = 0) -> ShardedLinear:
        """Create the sharded layer of ``linear``, whose values must be the same on all ranks.

        Each rank takes its shards from its local copy.

        Raises:
            ValueError: see the class.
            TypeError: a parameter of ``linear`` is a DTensor already.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(linear, mesh_of(group, linear.weight), shard_dim)
        return made

    def _take(self, linear: nn.Linear, mesh: DeviceMesh, shard_dim: int) -> None:
        if shard_dim not in (0, 1):
            raise ValueError(f"shard_dim is {shard_dim}: allowed are 0 (outputs of the layer) and 1 (its inputs)")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.world, self.shard_dim = group_name(mesh), mesh.size(), shard_dim
        for name in ("weight", "bias"):  # in the order of nn.Linear, since optimizers identify parameters by order
            self.register_parameter(name, None)
        for name, whole in linear.named_parameters():
            if isinstance(whole, DTensor):
                raise TypeError(f"the {name} of the linear is a DTensor already")
            shard = sharded(whole, mesh, self._dim(name))
            self.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        self.train(linear.training)

    def _dim(self, name: str) -> int:
        return self.shard_dim if name == "weight" else 0

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        weight = padded_shard(self.weight, self.shard_dim)
        if self.shard_dim == 1:
            input = pad(input, input.dim() - 1, self._missing(self.in_features))
        output = all_gather_weight_matmul(
            input, weight, self.shard_dim, self.group, transpose=True, grad_reduce_op="avg"
        )
        if self.shard_dim == 0 and self._missing(self.out_features):
            output = output[..., : self.out_features]
        if self.bias is None:
            return output
        bias: Tensor = apply(Mean, all_gather(padded_shard(self.bias, 0), 0, self.group), self.world)
        return output + bias[: self.out_features].to(output.dtype)  # under autocast the dtypes differ

    def _missing(self, size: int) -> int:
        """Return by how much the padded shards of all ranks together exceed a dimension of this size."""
        return self.world * shard_size(size, self.world) - size

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the parameters to the initial values of ``nn.Linear``, drawn for the whole layer.

        The seed must be the same on every rank. Every rank draws the whole weight and keeps its shard, so it needs
        memory for one whole weight.
        """
        device, dtype = self.weight.device, self.weight.dtype
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device, dtype)
        for name, whole in linear.named_parameters():
            mine = getattr(self, name)
            mine.to_local().copy_(sharded(whole, mine.device_mesh, self._dim(name)).to_local())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A whole tensor is cut down to this rank's shard. A DTensor with another sharding is redistributed.
        for name, mine in self.named_parameters(recurse=False):
            given: Any = state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or given.shape != mine.shape:
                continue  # torch's own message
            placed: Any = mine
            if isinstance(given, DTensor):
                state_dict[prefix + name] = given.redistribute(placed.device_mesh, placed.placements)
            else:
                whole = given if mine.is_meta else given.to(mine.device)  # meta: ``assign=True`` keeps given's device
                state_dict[prefix + name] = sharded(whole, placed.device_mesh, self._dim(name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """See `torch.nn.Module`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"shard_dim={self.shard_dim}, ranks={self.world}"
        )
