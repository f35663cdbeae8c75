"""Nested values as tensors and the rest: what passes between modules, and from stage to stage."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import TreeSpec, tree_flatten, tree_unflatten

_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(...), type, slice, range, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a mesh share a DTensor. This rank's part of it passes between modules in its place."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: DTensor) -> Sharding:
        """Return the sharding of a DTensor.

        Raises:
            TypeError: the ranks have partial sums.
        """
        if any(placement.is_partial() for placement in tensor.placements):
            raise TypeError(f"a DTensor of partial sums ({tensor.placements})")
        return Sharding(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def dtensor(self, part: Tensor) -> DTensor:
        """Return the DTensor of which ``part`` is this rank's part."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass
class Flat:
    """A nested value without its tensors.

    Attributes:
        spec: how its leaves are nested.
        constants: the leaves, with the sharding in place of a DTensor, and None in place of any other tensor.
        where: the indices of the tensors among the leaves.
    """

    spec: TreeSpec
    constants: list[Any]
    where: list[int]

    @staticmethod
    def of(value: Any, *, local: bool = True) -> tuple[Flat, list[Tensor]]:
        """Split a value into the value without its tensors, and the tensors.

        Args:
            local: take this rank's part of each DTensor. Otherwise a DTensor is a tensor like any other.

        Raises:
            TypeError: a leaf is neither a tensor nor a constant, or a DTensor of partial sums.
        """
        leaves, spec = tree_flatten(value)
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise TypeError(f"a {type(leaf).__name__}")
        tensors, constants = [leaves[index] for index in where], list(leaves)
        for number, index in enumerate(where):
            tensor, constants[index] = tensors[number], None
            if local and isinstance(tensor, DTensor):
                tensors[number], constants[index] = tensor.to_local(), Sharding.of(tensor)
        return Flat(spec, constants, where), tensors

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return the value with other tensors in place of its own."""
        leaves = list(self.constants)
        for index, tensor in zip(self.where, tensors, strict=True):
            sharding = leaves[index]
            leaves[index] = sharding.dtensor(tensor) if isinstance(sharding, Sharding) else tensor
        return tree_unflatten(leaves, self.spec)
