"""Where the tensors of a call come from, so that a later call of the same kind finds its own (`repeated`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan import Life
from ...runtime import Backend
from .planned.run import Run


class Source(NamedTuple):
    """Where a tensor of a call comes from.

    Attributes:
        base: the number of an argument, or of new memory; these are counted after the arguments.
        view: sizes, strides, and the offset in elements from the base; None: the tensor is the base itself.
    """

    base: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


class Recipe(NamedTuple):
    """How the tensors of a call are found.

    Attributes:
        arguments: for each argument that is a tensor, its place among the arguments: (index, index in a list or None).
        made: the sizes and the dtype of new memory; for the dtype of the first argument, None.
        given: the tensors that the script is called with.
        outputs: the tensors that the call writes.
        results: the tensors that the call returns, in the order of ``form``.
        form: what the call returns, with a number from 0 on in place of each tensor.
    """

    arguments: tuple[tuple[int, int | None], ...]
    made: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
    given: tuple[Source, ...]
    outputs: tuple[Source, ...]
    results: tuple[Source, ...]
    form: Any

    def found(self, args: tuple[Any, ...], backend: Backend) -> list[Tensor]:
        """Return the tensors of a call with these arguments: ``given``, ``outputs``, and ``results``."""
        tensors = [args[index] if inner is None else args[index][inner] for index, inner in self.arguments]
        first = tensors[0]
        for sizes, dtype in self.made:
            like = first if dtype is None else first.new_empty(0, dtype=dtype)
            tensors.append(backend.new_output(like, *sizes) if len(sizes) == 2 else like.new_empty(sizes))
        return [
            tensors[base] if view is None else _view(tensors[base], *view)
            for base, view in (*self.given, *self.outputs, *self.results)
        ]

    def formed(self, results: Sequence[Tensor]) -> Any:
        """Return what the call returns, given the tensors in it."""
        return _formed(self.form, results)


def recipe_of(run: Run, args: tuple[Any, ...], result: Any) -> Recipe | None:
    """Return how the tensors of a call were found, which has made one run. None if a tensor is neither an argument, nor
    memory that the plan writes before it reads it, nor a view of one of these.
    """
    places, arguments = _tensors_among(args)
    returned: list[Tensor] = []
    try:
        form = _form(result, returned)
    except TypeError:
        return None
    lives = run.plan.buffers
    written = [tensor for name, tensor in run.tensors.items() if lives.get(name) in (Life.OUTPUT, Life.SCRATCH)]
    finder = _Finder(arguments, [*run.outputs, *written])
    outputs, given, results = (
        [finder.source(tensor) for tensor in tensors] for tensors in (run.outputs, run.given, returned)
    )
    if None in (*outputs, *given, *results):
        return None
    if any(source.base < len(arguments) for source in (*outputs, *results)):  # type: ignore[union-attr]
        return None
    like = arguments[0].dtype
    made = tuple((tuple(each.shape), None if each.dtype == like else each.dtype) for each in finder.made)
    return Recipe(tuple(places), made, tuple(given), tuple(outputs), tuple(results), form)  # type: ignore[arg-type]


class _Finder:
    """Finds out where tensors come from.

    Args:
        arguments: the tensors among the arguments.
        written: tensors that the call writes before it reads them.

    Attributes:
        made: the new memory so far.
    """

    def __init__(self, arguments: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self._arguments = arguments
        self._written = {_storage(tensor) for tensor in written}
        self.made: list[Tensor] = []

    def source(self, tensor: Tensor) -> Source | None:
        """Return where a tensor comes from; None if it is unknown."""
        bases = [*self._arguments, *self.made]
        for number, base in enumerate(bases):
            if tensor is base:
                return Source(number, None)
        if not tensor.numel():
            return None
        storage = _storage(tensor)
        same = [number for number, base in enumerate(bases) if _storage(base) == storage]
        if not same and storage in self._written and tensor.is_contiguous() and tensor.storage_offset() == 0:
            self.made.append(tensor)
            return Source(len(bases), None)
        # Of two arguments in one storage, nothing says of which one the tensor is a view.
        if len(same) != 1 or bases[same[0]].dtype != tensor.dtype:
            return None
        offset = tensor.storage_offset() - bases[same[0]].storage_offset()
        return Source(same[0], (tuple(tensor.shape), tensor.stride(), int(offset)))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(base: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def _tensors_among(args: tuple[Any, ...]) -> tuple[list[tuple[int, int | None]], list[Tensor]]:
    places: list[tuple[int, int | None]] = []
    tensors: list[Tensor] = []
    for index, arg in enumerate(args):
        for inner, each in enumerate(arg) if isinstance(arg, (list, tuple)) else [(None, arg)]:
            if isinstance(each, Tensor):
                places.append((index, inner))
                tensors.append(each)
    return places, tensors


def _form(result: Any, tensors: list[Tensor]) -> Any:
    """Return ``result`` with the number of each tensor in its place, and add the tensors to ``tensors``. Raises
    TypeError for anything else than tensors, None, lists and tuples.
    """
    if result is None:
        return None
    if isinstance(result, Tensor):
        tensors.append(result)
        return len(tensors) - 1
    if type(result) in (list, tuple):
        return type(result)([_form(each, tensors) for each in result])
    raise TypeError(f"a result is {result!r}")


def _formed(form: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `_form` was given, with other tensors."""
    if form is None:
        return None
    return tensors[form] if type(form) is int else type(form)([_formed(each, tensors) for each in form])
