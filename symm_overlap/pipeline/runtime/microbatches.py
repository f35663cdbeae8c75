"""Cut a batch into microbatches, and merge their results, as torch.distributed.pipelining does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._torch import merge_chunks, split_args_kwargs_into_chunks, tree_flatten, tree_unflatten
from .step_run import StepBatch


class Chunks:
    """How batches are cut, and how results are merged.

    Args:
        count: the number of microbatches of a step.
        args, kwargs: for each argument, a ``TensorChunkSpec`` of torch.distributed.pipelining.microbatch. By default,
            tensors are cut along dimension 0, and every microbatch gets everything else.
        merge: how results are merged; by default along dimension 0.
    """

    def __init__(self, count: int, args: Any = None, kwargs: Any = None, merge: Any = None) -> None:
        self.count, self._args, self._kwargs, self._merge = count, args, kwargs, merge

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> StepBatch:
        """Return the microbatches of a batch.

        Raises:
            ValueError: the batch cannot be cut into ``count`` microbatches.
        """
        _require_cuttable("arguments", args, self._args is not None)
        _require_cuttable("keyword arguments", kwargs, self._kwargs is not None)
        _require_cuttable("target", target, False)
        args_split: Sequence[tuple[Any, ...]] = [()] * self.count
        kwargs_split: Sequence[dict[str, Any]] = [{}] * self.count
        targets: Sequence[Any] = [None] * self.count
        try:
            if args or kwargs:
                args_split, kwargs_split = split_args_kwargs_into_chunks(
                    args, kwargs, self.count, self._args, self._kwargs
                )
            if target is not None:
                targets = [each[0] for each in split_args_kwargs_into_chunks((target,), {}, self.count)[0]]
        except (AssertionError, IndexError) as error:  # too few rows; a TensorChunkSpec of another dimension
            raise ValueError(f"a batch cannot be cut into {self.count} microbatches: {error}") from None
        for name, found in (("arguments", args_split), ("keyword arguments", kwargs_split), ("target", targets)):
            if len(found) != self.count:
                raise ValueError(
                    f"the {name} of this step cannot be cut into {self.count} microbatches: torch cuts them into "
                    f"{len(found)}"
                )
        return StepBatch(args_split, kwargs_split, targets)

    def merged(self, results: Sequence[Any]) -> Any:
        """Merge the results of the microbatches into one.

        By default, tensors are concatenated along dimension 0, and 0-dimensional tensors become a vector. Other values
        become one value if all are known to be equal, and otherwise a list. So do results of different structure.
        """
        if self._merge is not None:
            return merge_chunks(list(results), self._merge)
        leaves, structures = zip(*map(tree_flatten, results), strict=True)
        if any(structure != structures[0] for structure in structures):
            return list(results)
        return tree_unflatten([_merged(each) for each in zip(*leaves, strict=True)], structures[0])


def _require_cuttable(name: str, values: Any, specified: bool) -> None:
    """Raise ValueError for tensors that have no rows. ``specified`` is True if the caller says how they are cut."""
    for value in tree_flatten(values)[0] if not specified else ():
        if isinstance(value, Tensor) and not (value.dim() and value.shape[0]):
            advice = "" if value.dim() else ". Give a number in place of it, which every microbatch gets"
            raise ValueError(
                f"the {name} of this step cannot be cut into microbatches: a tensor of shape {tuple(value.shape)} has "
                f"no rows{advice}"
            )


def _merged(values: tuple[Any, ...]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat(values) if values[0].dim() else torch.stack(values)
    return values[0] if all(_equal(value, values[0]) for value in values[1:]) else list(values)


def _equal(one: Any, other: Any) -> bool:
    """True if two values are known to be equal. Arrays, and objects that contain tensors, may have no single answer."""
    try:
        return bool(one is other or one == other)
    except Exception:  # from the value's own comparison
        return False
