"""Calls that repeat an earlier call of the same kind, without describing themselves again.

Most of the time that the host needs for a small call is Python's: it finds the plan, names the memory, and looks up the
script that issues the plan. All of that is the same for calls whose arguments have the same sizes and layouts, under
the same settings. So the first call of a kind in each half of the workspace leaves its script in a `Repeated`. Besides
the scripts, a `Repeated` contains where each tensor comes from: which argument or new memory it is, or of which of
these it is a view.

A call is repeated only if

- its op says so (`symm_overlap.collective.registration.define`): it computes nothing besides one exchange, whose plan
  writes all of the memory that the call returns;
- the script of the plan needs no Python;
- every tensor that the script uses is an argument, a view of one, or memory that the plan writes before it reads it. A
  copy of an argument, for example, is none of these;
- nothing looks at single steps: no profiler, no step transform, no comparison of calls between ranks, no `prepare`, and
  no capture of a CUDA graph.

Any other call takes the usual way, which also is what a repeated call takes as soon as something has changed, such as
the size of the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _C
from ...plan import Life
from ...runtime import meets_in_kernels
from .call import Peers, place_of
from .planned.run import Run
from .recorded import recording

MOST_REPEATED = 256  # for one group; if a program makes more kinds of calls, all are forgotten

_NEVER = object()
"""What is kept for calls that cannot be repeated."""

_NOT_NOW = object()
"""What `Repeated.call` returns for a call that has to take the usual way."""


def call(eager: Callable[..., Any], peers: Peers, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``eager(peers, *args, **kwargs)``, by repeating an earlier call if possible.

    Tensors are among ``args``. If an op gathers a tensor, it comes first.
    """
    state, settings = peers.state, peers.settings
    if state.alone or settings.needs is not None or settings.transforms or settings.comparing or _C.profiled():
        return eager(peers, *args, **kwargs)
    kind = _C.call_key((args, *kwargs.items()) if kwargs else args)
    # What is gathered may be in symmetric memory in one call, and in other memory in the next.
    place = place_of(args[0], state) if isinstance(args[0], Tensor) else None
    key = eager, kind, place, settings.routing, torch.is_inference_mode_enabled()  # inference mode has views of its own
    known = state.repeated.get(key)
    if known is _NEVER:
        return eager(peers, *args, **kwargs)
    if known is not None:
        result = known.call(peers, args)
        if result is not _NOT_NOW:
            return result
    with recording() as runs:
        result = eager(peers, *args, **kwargs)
    kept = _after(known, runs, args, result)
    if kept is not None:
        if len(state.repeated) >= MOST_REPEATED:
            state.repeated.clear()
        state.repeated[key] = kept
    return result


def _after(known: Repeated | None, runs: Sequence[Run], args: tuple[Any, ...], result: Any) -> object:
    """Return what to keep of calls of a kind after one of them has taken the usual way."""
    recipe = recipe_of(runs[0], args, result) if len(runs) == 1 and _is_scripted(runs[0]) else None
    if recipe is None:  # a call that was only captured has made no run
        return _NEVER if known is None and runs else known
    if known is None or not known.serves(runs[0], recipe):
        known = Repeated(runs[0], recipe)
    known.keep(runs[0])
    return known


def _is_scripted(run: Run) -> bool:
    return run.script is not None and run.script.complete


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
        made: for new memory, its sizes, and its dtype, or None for the dtype of the first argument.
        given, outputs: the tensors that the script is called with, and those that the call writes.
        results: the tensors that the call returns, in the order of ``form``.
        form: what the call returns, with a number from 0 on in place of each tensor.
    """

    arguments: tuple[tuple[int, int | None], ...]
    made: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
    given: tuple[Source, ...]
    outputs: tuple[Source, ...]
    results: tuple[Source, ...]
    form: Any


def recipe_of(run: Run, args: tuple[Any, ...], result: Any) -> Recipe | None:
    """Return how the tensors of a call were found. None if a tensor is neither an argument, nor memory that the plan
    writes first, nor a view of one of these.
    """
    places, arguments = _tensors_among(args)
    given = list(run.given)
    if run.turn is not None:
        given = given[: -len(run.turn.memory())]  # the flags of the lane come from there in each call
    returned: list[Tensor] = []
    form = _form(result, returned)
    buffers = run.plan.buffers
    written = [tensor for name, tensor in run.tensors.items() if buffers.get(name) in (Life.OUTPUT, Life.SCRATCH)]
    finder = _Finder(arguments, [*run.outputs, *written])
    outputs, sources, results = (
        [finder.source(tensor) for tensor in tensors] for tensors in (run.outputs, given, returned)
    )
    found = [*outputs, *sources, *results]
    if None in found or any(source.base < len(arguments) for source in (*outputs, *results)):  # type: ignore[union-attr]
        return None
    like = arguments[0].dtype
    made = tuple((tuple(each.shape), None if each.dtype == like else each.dtype) for each in finder.made)
    return Recipe(tuple(places), made, tuple(sources), tuple(outputs), tuple(results), form)  # type: ignore[arg-type]


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
    """Return ``result`` with the number of each tensor in its place, and add the tensors to ``tensors``."""
    if isinstance(result, Tensor):
        tensors.append(result)
        return len(tensors) - 1
    if isinstance(result, (list, tuple)):
        return type(result)(_form(each, tensors) for each in result)
    return result


def _formed(form: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `_form` was given, with other tensors."""
    if form is None:
        return None
    return tensors[form] if type(form) is int else type(form)([_formed(each, tensors) for each in form])


class Repeated:
    """What calls of one kind have in common.

    Attributes:
        scripts: for each half of the workspace, the script that issues the plan; None until a call has used that half.
    """

    def __init__(self, run: Run, recipe: Recipe) -> None:
        call = run.call
        self.scripts: list[Any] = [None, None]
        self._recipe = recipe
        self._all = recipe.given + recipe.outputs + recipe.results
        self._ends = len(recipe.given), len(recipe.given) + len(recipe.outputs)
        self._lane, self._op = call.lane, call.op
        self._backend, self._turn, self._digest = call.backend, run.turn, call.route.digest
        self._nbytes, self._channels = run.layout.nbytes, run.plan.channels
        self._by_kernels = meets_in_kernels(run.plan)
        call.lane.tell_when_it_grows(self)

    def keep(self, run: Run) -> None:
        """Use the script of a call for later calls."""
        with self._lane.lock:
            if run.generation == self._lane.generation:  # another thread may have made the workspace grow meanwhile
                self.scripts[run.parity] = run.script

    def forget(self) -> None:
        """Forget the scripts, which contain views of the workspace."""
        self.scripts = [None, None]

    def serves(self, run: Run, recipe: Recipe) -> bool:
        """True if another call of the same kind, which has made ``run``, can be repeated like this one."""
        same, call = (self._recipe, self._lane, self._digest, self._nbytes), run.call
        return (
            same == (recipe, call.lane, call.route.digest, run.layout.nbytes)
            and (self._turn is None) == (run.turn is None)
            and (self._turn is None or self._turn.like(run.turn))
        )

    def call(self, peers: Peers, args: tuple[Any, ...]) -> Any:
        """Repeat the call with other tensors, and return its result, or `_NOT_NOW`, after nothing was done."""
        lane, turn, seconds = self._lane, self._turn, peers.settings.seconds
        if lane.workspace.capturing() or (turn is not None and turn.seconds != seconds):
            return _NOT_NOW
        recipe = self._recipe
        tensors = [args[index] if inner is None else args[index][inner] for index, inner in recipe.arguments]
        first = tensors[0]
        for shape, dtype in recipe.made:
            new = self._backend.new_output(first, *shape) if dtype is None else first.new_empty(shape, dtype=dtype)
            tensors.append(new)
        found = [tensors[base] if view is None else _view(tensors[base], *view) for base, view in self._all]
        given_end, outputs_end = self._ends
        given = found[:given_end]
        ran = lane.run(
            self._op,
            lambda parity: self._issue(parity, given),
            found[given_end:outputs_end],
            nbytes=self._nbytes,
            channels=self._channels,
            seconds=seconds,
            call_hash=peers.hash_of(self._digest),
            by_kernels=self._by_kernels,
            fits=self._fits,
        )
        return _NOT_NOW if ran is None else _formed(recipe.form, found[outputs_end:])

    def _fits(self, half: int) -> bool:
        return self.scripts[half] is not None

    def _issue(self, parity: int, given: list[Tensor]) -> _C.Flags | None:
        script, turn = self.scripts[parity], self._turn
        if turn is None:
            script.run(self._op, given, {})
            return None
        turn.begin()
        try:
            script.run(self._op, (*given, *turn.memory()), {})
        except BaseException as error:
            turn.abandon(error)
            raise
        return turn.end()  # type: ignore[no-any-return]


def _view(base: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    return base.as_strided(sizes, strides, base.storage_offset() + offset)
