"""A batch as the stages see it: its tensors by name, cut into microbatches, and its constant rest."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._torch import keystr, tree_flatten_with_path
from .trace.flat import Flat

_PLAIN = (int, float, str)  # their text is the same on every rank


@dataclass(frozen=True)
class Entries:
    """Some entries of a batch without their tensors. They can be rebuilt from tensors by name.

    Attributes:
        names: the names of the tensors, in the order of ``flat``.
    """

    flat: Flat
    names: tuple[str, ...]

    def filled(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the entries with these tensors."""
        entries: dict[str, Any] = self.flat.filled([tensors[name] for name in self.names])
        return entries

    @property
    def constants(self) -> Hashable:
        """Everything but the tensors, as a key for look-ups."""
        # Before Python 3.12, slices cannot be keys.
        constants = (repr(each) if isinstance(each, slice) else each for each in self.flat.constants)
        return str(self.flat.spec), tuple((type(each), each) for each in constants), self.names


@dataclass(frozen=True)
class Batch:
    """A batch of ``run_train`` or ``run_eval``.

    Attributes:
        inputs: the entries for the model.
        target: the entry for the loss, or none.
        cut: the tensors that are cut into microbatches, by name, each with the dimension along which it is cut.
        shared: the tensors that every microbatch has.
    """

    inputs: Entries
    target: Entries
    cut: dict[str, tuple[Tensor, int]]
    shared: dict[str, Tensor]

    @staticmethod
    def of(batch: Mapping[str, Any], target: str | None, dims: Mapping[str, int | None], microbatches: int) -> Batch:
        """Read a batch.

        Args:
            target: the name of the entry for the loss.
            dims: for entries of the batch, the dimension along which each is cut. None means that every microbatch has
                all of it. The default is 0, and None for tensors without dimensions.

        Raises:
            TypeError: an entry is neither a tensor nor a constant, nor a list, tuple or dict of these.
            ValueError: a tensor cannot be cut into so many microbatches, tensors have different sizes along the
                dimensions that they are cut by default, or ``dims`` names an entry that the batch does not have.
        """
        if unknown := dims.keys() - batch.keys() - {target}:
            raise ValueError(
                f"batch_dims names {', '.join(sorted(unknown))}, which the batch does not have: it has "
                f"{', '.join(batch)}. Pass None for an entry that this batch does not need"
            )
        cut: dict[str, tuple[Tensor, int]] = {}
        shared: dict[str, Tensor] = {}
        for key, value in batch.items():
            for name, tensor in _tensors({key: value}).items():
                dim = dims.get(key, 0 if tensor.dim() else None)
                if dim is None:
                    shared[name] = tensor
                elif not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] < microbatches:
                    raise ValueError(
                        f"{name} of the batch has shape {tuple(tensor.shape)} and cannot be cut along dimension {dim} "
                        f"into {microbatches} microbatches. Give a larger batch, or batch_dims={{{key!r}: None}} if "
                        "every microbatch needs all of it"
                    )
                else:
                    cut[name] = tensor, dim
        if not cut:
            raise ValueError("the batch has no tensor that could be cut into microbatches")
        if microbatches > 1:
            _require_equal_sizes(
                cut, {name for key in batch.keys() - dims.keys() for name in _tensors({key: batch[key]})}
            )
        _warn_if_uneven(cut, microbatches)
        inputs = {key: value for key, value in batch.items() if key != target}
        return Batch(_entries(inputs), _entries({key: batch[key] for key in batch if key == target}), cut, shared)

    def microbatches(self, count: int) -> list[dict[str, Tensor]]:
        """Return the tensors of each microbatch by name: its parts of those that are cut, and the shared ones."""
        split = {name: tensor.tensor_split(count, dim) for name, (tensor, dim) in self.cut.items()}
        return [{name: parts[index] for name, parts in split.items()} | self.shared for index in range(count)]

    def described(self, mode: bool | None, gradients: bool, autocast: object, passed: Iterable[str] = ()) -> str:
        """Return a description of the inputs and of how they are used, to compare it with those of other ranks.

        Args:
            passed: digests of the values that pass between the stages.
        """
        tensors = {name: tensor for name, (tensor, _) in self.cut.items()} | self.shared
        of_tensors = (
            f"{name} of shape {tuple(tensors[name].shape)}, {tensors[name].dtype}" for name in self.inputs.names
        )
        constants = (each for each in self.inputs.flat.constants if each is not None)
        of_constants = (repr(each) if isinstance(each, _PLAIN) else type(each).__name__ for each in constants)
        how = (
            {None: "", True: "in training mode", False: "in evaluation mode"}[mode],
            f"autocast {autocast}" * bool(autocast),
            *(f"values between stages with the digests {each}" for each in passed if each),
        )
        return "; ".join(
            filter(None, [*of_tensors, *of_constants, *how, "with gradients" if gradients else "forwards alone"])
        )

    @property
    def uncut(self) -> dict[str, Any]:
        """The whole tensors that are cut, by name."""
        return {name: tensor for name, (tensor, _) in self.cut.items()}


def _require_equal_sizes(cut: Mapping[str, tuple[Tensor, int]], by_default: Collection[str]) -> None:
    """Check that tensors of other sizes than the rest are cut only if the caller says so. They may have no samples at
    all, such as a weight for each class.

    Raises:
        ValueError: one of ``by_default`` has another size.
    """
    sizes = {name: tensor.shape[dim] for name, (tensor, dim) in cut.items()}
    if len(set(sizes.values())) > 1 and not sizes.keys().isdisjoint(by_default):
        raise ValueError(
            "the tensors of the batch have different sizes along the dimensions in which they are cut into "
            f"microbatches: {', '.join(f'{name} has {size}' for name, size in sizes.items())}. Give batch_dims= with "
            "None for those that every microbatch needs all of, and with a dimension for all others"
        )


def _warn_if_uneven(cut: Mapping[str, tuple[Tensor, int]], microbatches: int) -> None:
    size, name = max((tensor.shape[dim], name) for name, (tensor, dim) in cut.items())
    if size % microbatches:
        warnings.warn(
            f"{name} of the batch has {size} samples, which {microbatches} microbatches cannot share evenly: some have "
            f"{size // microbatches + 1} and some {size // microbatches}. Each microbatch counts the same in the loss "
            "and in the gradients, so samples in smaller ones count more",
            stacklevel=5,
        )


def _entries(batch: Mapping[str, Any]) -> Entries:
    return Entries(Flat.of(dict(batch), local=False)[0], tuple(_tensors(batch)))


def _tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of some entries by name: the name of the entry and the path inside it."""
    found = {}
    for path, leaf in tree_flatten_with_path(dict(batch))[0]:
        name = keystr(path)  # like "['mask']", so it never equals the name of an argument of the runtime
        try:
            Flat.of(leaf, local=False)
        except TypeError as error:
            raise TypeError(f"{name} of the batch is {error}: it must be a tensor or a constant") from None
        if isinstance(leaf, Tensor):
            found[name] = leaf
    return found
