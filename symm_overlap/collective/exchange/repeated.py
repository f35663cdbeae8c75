"""Calls that repeat an earlier call of the same kind, without describing themselves again.

Most of the time that the host needs for a small call is Python's: it finds the plan, names the memory, and looks up the
script that issues the plan. All of that is the same for calls whose arguments have the same sizes and layouts, under
the same settings. So the first call of a kind in each half of the workspace leaves its script in a `Repeated`, with a
`Recipe`: which argument or new memory each tensor is, or of which of these it is a view.

A call is repeated only if

- its op says so (`symm_overlap.collective.dispatch.registration.define`): it computes nothing besides one exchange,
  whose plan writes all of the memory that the call returns;
- the script of the plan needs no Python;
- every tensor that the script uses is an argument, a view of one, or memory that the plan writes before it reads it. A
  copy of an argument, for example, is none of these;
- nothing looks at single steps: no profiler, no step transform, no comparison of calls between ranks, no `prepare`, and
  no capture of a CUDA graph.

Any other call takes the usual way, as does a call after something has changed, such as the size of the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ... import _C
from ...runtime import call_hash, meets_in_kernels
from .call import place_of
from .peers import Peers
from .planned.run import Run
from .recipe import Recipe, recipe_of
from .recorded import recording

MOST_REPEATED = 256
"""How many kinds of calls of a group may be repeated. If there are more, the oldest are forgotten."""

_NEVER = object()
"""What is kept of calls that cannot be repeated."""

_NOT_NOW = object()
"""What `Repeated.call` returns for a call that has to take the usual way."""


class Repeatable:
    """An op whose calls may be repeated.

    Args:
        eager: the implementation of the op; see `symm_overlap.collective.dispatch.registration.define`.
        gathers: whether the first argument is gathered, so that peers may read it in place.
    """

    def __init__(self, eager: Callable[..., Any], gathers: bool) -> None:
        self.eager, self._gathers = eager, gathers

    def call(self, peers: Peers, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: bytes | None) -> Any:
        """Return ``eager(peers, *args, **kwargs)``, by repeating an earlier call if possible.

        Args:
            key: the `kernel_key` of the op's arguments, if the caller knows it.
        """
        state, settings, eager = peers.state, peers.settings, self.eager
        if state.alone or settings.needs is not None or settings.transforms or settings.comparing or _C.profiled():
            return eager(peers, *args, **kwargs)
        # What is gathered may be in symmetric memory in one call, and in other memory in the next. It may be None,
        # which the dispatcher lets pass and the op rejects.
        place = place_of(args[0], state) if self._gathers and args[0] is not None else None
        kind = eager, key or _C.call_key((args, *kwargs.items())), place, settings.routing
        cache = state.repeated
        known = cache.get(kind)
        if known is _NEVER:
            return eager(peers, *args, **kwargs)
        if known is not None:
            result = known.call(peers, args)
            if result is not _NOT_NOW:
                return result
        with recording() as runs:
            result = eager(peers, *args, **kwargs)
        kept = _to_keep(known, runs, args, result)
        if kept is not known:
            if kind not in cache:  # a copy of the keys, because other threads may change the cache meanwhile
                for oldest in [*cache][: max(0, len(cache) + 1 - MOST_REPEATED)]:
                    cache.pop(oldest, None)
            cache[kind] = kept
        return result


def _to_keep(known: Repeated | None, runs: Sequence[Run], args: tuple[Any, ...], result: Any) -> object:
    """Return what to keep of calls of a kind after one of them has taken the usual way."""
    if not all(run.ran for run in runs):  # only captured
        return known
    recipe = recipe_of(runs[0], args, result) if len(runs) == 1 and _is_scripted(runs[0]) else None
    if recipe is None:
        return _NEVER if known is None else known
    if known is None or not known.serves(runs[0], recipe):
        known = Repeated(runs[0], recipe)
    known.keep(runs[0])
    return known


def _is_scripted(run: Run) -> bool:
    return run.script is not None and run.script.complete


class Repeated:
    """What calls of one kind have in common.

    Attributes:
        scripts: for each half of the workspace, the script that issues the plan; None until a call has used that half.
    """

    def __init__(self, run: Run, recipe: Recipe) -> None:
        call = run.call
        self.scripts: list[Any] = [None, None]
        self._recipe = recipe
        self._ends = len(recipe.given), len(recipe.given) + len(recipe.outputs)
        self._lane, self._op, self._backend = call.lane, call.op, call.backend
        self._turn, self._digest = run.turn, call.route.digest
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
        found = self._recipe.found(args, self._backend)
        given_end, outputs_end = self._ends
        given = found[:given_end]
        ran = lane.run(
            self._op,
            lambda half: self._issue(half, given),
            found[given_end:outputs_end],
            nbytes=self._nbytes,
            channels=self._channels,
            seconds=seconds,
            call_hash=call_hash(self._digest, peers.number),
            by_kernels=self._by_kernels,
            fits=self._fits,
        )
        return _NOT_NOW if ran is None else self._recipe.formed(found[outputs_end:])

    def _fits(self, half: int) -> bool:
        return self.scripts[half] is not None

    def _issue(self, half: int, given: list[Tensor]) -> _C.Flags | None:
        script, op = self.scripts[half], self._op
        if self._turn is not None:
            return self._turn.run(lambda memory: script.run(op, (*given, *memory), {}))
        script.run(op, given, {})
        return None
