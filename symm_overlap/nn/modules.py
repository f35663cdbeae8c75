"""``ColumnParallelLinear`` and ``RowParallelLinear``: linear layers that are sharded over the ranks.

Their parameters are DTensors with the names, shapes and values of the parameters of ``nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ..collective.arguments import group_name
from .linear import LAST, Column, Row
from .offer import without_offer
from .sharding import distributed, refuse_wrong_checkpoints, require_mesh, require_shards

_Self = TypeVar("_Self", bound="_ParallelLinear")
Device = torch.device | str | None


class _ParallelLinear(nn.Module):
    """The base of both layers: the parameters of an ``nn.Linear`` as DTensors, and how they are sharded."""

    parallel: Any

    def _shard_parameters(self: _Self, linear: nn.Linear, src_data_rank: int | None) -> _Self:
        """Register this rank's shards of the parameters of ``linear``."""
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", None)
        for (name, whole), placement in zip(linear.named_parameters(), self.parallel.placements, strict=False):
            shard = distributed(whole.data, self.parallel.mesh, placement, src_data_rank)
            self.register_parameter(name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values of ``nn.Linear``. With the same seed on every rank they equal those of a whole layer.

        Every rank draws the whole weight and keeps its shard, so it needs memory for one whole weight.
        """
        bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, bias, self.weight.device, self.weight.dtype)
        for name, whole in linear.named_parameters():
            mine = getattr(self, name)
            mine.to_local().copy_(distributed(whole.data, mine.device_mesh, mine.placements[0], None).to_local())

    def extra_repr(self) -> str:
        """See `torch.nn.Module`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"input={self.parallel.input}, output={self.parallel.output}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are sharded: each rank computes its part. Equivalent to this on rank r::

        weight, bias = linear.weight.chunk(world)[r], linear.bias.chunk(world)[r]
        y = F.linear(all_gather(x, sequence_dim) if sequence_dim is not None else x, weight, bias)

    Args:
        in_features, bias, device, dtype: as for ``nn.Linear``. With device "meta", call ``to_empty`` and
            ``reset_parameters`` later.
        out_features: the layer's outputs on all ranks together. A sequence of equal numbers is for several outputs
            that share one weight, such as q, k and v of one input. Each of them is sharded.
        mesh: DeviceMesh of one dimension.
        sequence_dim: the dimension along which the input is sharded, for sequence parallelism: the layer is an
            all-gather-matmul. None: every rank has the whole input, whose gradient is a matmul-all-reduce.
        contiguous: whether the output is contiguous, as for ``nn.Linear``. If ``sequence_dim`` is not 0 and the model
            does not need contiguous outputs, False saves a copy.

    Input (..., in_features); output (..., out_features / world), or a tuple of such tensors for several outputs. Both
    are this rank's tensors; an input may also be a DTensor of any layout. dtypes: float32, float64, bfloat16, float16.

    Raises:
        ValueError: the ranks cannot share the outputs evenly, several outputs differ in size, or the mesh has several
            dimensions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        contiguous: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, _sum(out_features), bias, device, dtype)
        self._lay_out(out_features, mesh, sequence_dim, contiguous)
        self._shard_parameters(linear, None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        contiguous: bool = True,
        out_features: int | Sequence[int] | None = None,
        src_data_rank: int | None = 0,
    ) -> ColumnParallelLinear:
        """Return the layer with the parameters of ``linear``.

        Args:
            mesh, sequence_dim, contiguous: see the class.
            out_features: the sizes of several outputs of ``linear``, see the class. None: one output.
            src_data_rank: the rank of the mesh whose values all ranks get. None: every rank uses its own values,
                without communication.

        Raises:
            ValueError: ``out_features`` does not add up to ``linear.out_features``. See also the class.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._lay_out(_given(out_features, linear.out_features, "out_features"), mesh, sequence_dim, contiguous)
        return made._shard_parameters(linear, src_data_rank)

    def _lay_out(
        self, out_features: int | Sequence[int], mesh: DeviceMesh, sequence_dim: int | None, contiguous: bool
    ) -> None:
        require_mesh(mesh, "ColumnParallelLinear")
        parts = _parts(
            out_features,
            "ColumnParallelLinear: several outputs of one weight",
            ", and call them by symm_overlap.nn.column_parallel, which gathers once",
        )
        require_shards(_sum(out_features), parts, mesh, "ColumnParallelLinear: out_features")
        given = Replicate() if sequence_dim is None else Shard(sequence_dim)
        self.parallel = Column(mesh, group_name(mesh), given, LAST, True, parts=parts, contiguous=contiguous)
        self.several = not isinstance(out_features, int)
        refuse_wrong_checkpoints(self, parts, mesh)
        without_offer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "offer_slot" not in self.__dict__:  # saved by an earlier version
            without_offer(self)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See the class."""
        output: Tensor = self.parallel(self, input)
        return output.chunk(self.parallel.parts, -1) if self.several else output


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are sharded: each rank has its part. Equivalent to this on rank r::

        y = F.linear(x, linear.weight.chunk(world, 1)[r])
        y = (reduce_scatter(y, "sum", sequence_dim) if sequence_dim is not None else all_reduce(y)) + linear.bias

    Args:
        in_features: the layer's inputs on all ranks together. A sequence of equal numbers is for several inputs that
            are side by side in one tensor, such as concatenated outputs of several layers. Each of them is sharded.
        out_features, bias, device, dtype: as for ``nn.Linear``. With device "meta", call ``to_empty`` and
            ``reset_parameters`` later.
        mesh: DeviceMesh of one dimension.
        sequence_dim: the dimension along which the output is sharded, for sequence parallelism: the layer is a
            matmul-reduce-scatter. None: every rank gets the whole output, by a matmul-all-reduce.

    Input (..., in_features / world), for several inputs this rank's part of the first, then of the second, and so on;
    output (..., out_features), where the size of ``sequence_dim`` is divided by the world size. Both are this rank's
    tensors; an input may also be a DTensor of any layout. dtypes: float32, float64, bfloat16, float16.

    Raises:
        ValueError: the ranks cannot share the inputs evenly, several inputs differ in size, or the mesh has several
            dimensions. A call raises it if the ranks cannot share ``sequence_dim`` of the output evenly.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._lay_out(in_features, mesh, sequence_dim)
        self._shard_parameters(nn.Linear(_sum(in_features), out_features, bias, device, dtype), None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        in_features: int | Sequence[int] | None = None,
        src_data_rank: int | None = 0,
    ) -> RowParallelLinear:
        """Return the layer with the parameters of ``linear``; see `ColumnParallelLinear.from_linear`.

        Args:
            in_features: the sizes of several inputs of ``linear``, see the class. None: one input.

        Raises:
            ValueError: ``in_features`` does not add up to ``linear.in_features``. See also the class.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._lay_out(_given(in_features, linear.in_features, "in_features"), mesh, sequence_dim)
        return made._shard_parameters(linear, src_data_rank)

    def _lay_out(self, in_features: int | Sequence[int], mesh: DeviceMesh, sequence_dim: int | None) -> None:
        require_mesh(mesh, "RowParallelLinear")
        parts = _parts(in_features, "RowParallelLinear: several inputs of one weight")
        require_shards(_sum(in_features), parts, mesh, "RowParallelLinear: in_features")
        wanted = Replicate() if sequence_dim is None else Shard(sequence_dim)
        self.parallel = Row(mesh, group_name(mesh), LAST, wanted, True, parts=parts)
        refuse_wrong_checkpoints(self, parts, mesh)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        output: Tensor = self.parallel(self, input)
        return output


def _sum(features: int | Sequence[int]) -> int:
    return features if isinstance(features, int) else sum(features)


def _given(features: int | Sequence[int] | None, whole: int, name: str) -> int | Sequence[int]:
    """Return the sizes of what forms the features of a linear layer. Raises ValueError if they do not add up."""
    features = whole if features is None else features
    if _sum(features) != whole:
        raise ValueError(f"{name} {features} add up to {_sum(features)}, but the linear has {whole}")
    return features


def _parts(features: int | Sequence[int], what: str, how: str = "") -> int:
    """Return how many equal parts form the features. Raises ValueError if their sizes differ."""
    sizes = [features] if isinstance(features, int) else list(features)
    if len(set(sizes)) != 1:
        raise ValueError(f"{what} must have one size, not {sizes}: use one layer for each{how}")
    return len(sizes)
