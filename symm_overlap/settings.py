"""Settings of the ops: one immutable record. ``with`` blocks (`blocks`) set it, and every call reads it once.

A field that is None has not been set. A backward pass runs under the settings of its forward pass. A block around
``backward()`` overrides them field by field, also if autograd runs the backward pass on a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from operator import index as as_int
from typing import Any, TypeVar

from . import _C
from ._torch import compiling, context_of_backward
from .plan import Plan, Table

Transform = Callable[[Plan, Table], Table]
"""Replaces the functions that run the steps of a plan, for example by functions that pause first. Tests, benchmarks and
profilers use it. The results of a program must not depend on it."""

PATHS = ("sequential", "pipelined", "fused", "c10d")
"""The paths that a program may force. `symm_overlap.collective.choosing.chooser` explains them."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Settings:
    """The settings of a program for its calls. None means: not set.

    Attributes:
        path, chunks, streams, span: see `symm_overlap.force_path`.
        timeout: how many seconds one wait for a peer may last; see `symm_overlap.timeout`.
        lane: see `symm_overlap.lane`.
        order: see `symm_overlap.sum_order`.
        compare: whether all ranks compare every call before it starts (SYMM_OVERLAP_CHECK).
        transforms: see `Transform`; the first one is applied first.
        needs: if set, calls record here what they need and are not carried out; see
            `symm_overlap.collective.exchange.needs`.
    """

    path: str | None = None
    chunks: int | None = None
    streams: int | None = None
    span: int | None = None
    timeout: float | None = None
    lane: int | None = None
    order: str | None = None
    compare: bool | None = None
    transforms: tuple[Transform, ...] = ()
    needs: Any = None

    def with_defaults(self, other: Settings) -> Settings:
        """Return these settings, with the values of ``other`` for fields that are not set here."""
        if self == _NOTHING:
            return other
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in mine.items() if value not in (None, ())})

    @cached_property
    def routing(self) -> tuple[Any, ...]:
        """The settings that decide how a call is carried out, besides the environment. Routes are looked up by them."""
        return self.path, self.chunks, self.streams, self.span, self.order, self.lane_index, self.compare

    @property
    def forced(self) -> tuple[Any, ...]:
        """The settings that must be the same on all ranks: forced path, chunks, streams, span, order."""
        return self.forced_path, self.chunks, self.streams, self.span, self.order

    @cached_property
    def lane_index(self) -> int:
        """The lane to use."""
        return self.lane or 0

    @property
    def seconds(self) -> float:
        """The deadline of one wait, in seconds."""
        return self.timeout if self.timeout is not None else _C.process_timeout_ms() / 1000

    @property
    def comparing(self) -> bool:
        """Whether all ranks compare every call before it starts."""
        return bool(environment().compare) if self.compare is None else self.compare

    @property
    def forced_path(self) -> str | None:
        """The path that a block or the environment forces."""
        if self.path is not None:
            return self.path
        path = environment().path
        if path is not None and path not in PATHS:
            raise ValueError(f"SYMM_OVERLAP_PATH is {path!r}: allowed are {', '.join(PATHS)}")
        return path


_NOTHING = Settings()
_settings: ContextVar[Settings] = ContextVar("symm_overlap settings", default=_NOTHING)
_outside: ContextVar[tuple[Settings, ...]] = ContextVar("symm_overlap settings outside of the blocks", default=())
"""The settings outside of each block that has been entered, the innermost block last."""


@cache
def environment() -> Settings:
    """Return the settings that environment variables set for the whole program.

    They are read at the first call of an op. The C++ code reads SYMM_OVERLAP_TIMEOUT itself.
    """
    compare = os.environ.get("SYMM_OVERLAP_CHECK", "0").lower() not in ("", "0", "false", "no", "off")
    return Settings(path=os.environ.get("SYMM_OVERLAP_PATH") or None, compare=compare)


def current() -> Settings:
    """Return the settings that the blocks around the caller have made."""
    return _settings.get()


def of_call() -> Settings:
    """Return the settings of a call of an op: those of the blocks around the caller, or, on a thread of autograd, those
    of the blocks around ``backward()``.
    """
    here = _settings.get()
    if here is _NOTHING:  # this may be a thread of autograd, which does not have the caller's context
        context = context_of_backward()
        here = _NOTHING if context is None else context.get(_settings, _NOTHING)
    return here


def in_backward(forward: Settings) -> Settings:
    """Return the settings of a backward pass: those of the blocks around ``backward()``, else those of its forward
    pass.
    """
    return of_call().with_defaults(forward)


class Block(ContextDecorator):
    """A block with settings of its own. One object may be entered again, also inside itself and in several threads, and
    may decorate functions.
    """

    def __init__(self, name: str, settings_inside: Callable[[Settings], Settings]) -> None:
        """``settings_inside`` returns the settings inside the block, given those outside of it.

        ``name``: how users know the block; empty if it is not theirs, and may be entered while something is compiled.
        """
        self._name, self._settings_inside = name, settings_inside

    def __call__(self, function: _Function) -> _Function:
        if isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function):
            raise TypeError(
                f"symm_overlap.{self._name} cannot decorate {function.__qualname__}, because its body runs later than "
                "the call: put the block into the body"
            )
        return super().__call__(function)

    def __enter__(self) -> None:
        if self._name and compiling():
            raise RuntimeError(
                f"symm_overlap.{self._name} cannot be in a compiled graph: put it around the function's call"
            )
        outside = _settings.get()
        _set(self._settings_inside(outside))
        _outside.set((*_outside.get(), outside))

    def __exit__(self, *error: object) -> None:
        *others, outside = _outside.get()
        _outside.set(tuple(others))
        _set(outside)


def applied(settings: Settings) -> Block:
    """Use exactly these settings inside the block."""
    return Block("", lambda outside: settings)


def _set(settings: Settings) -> None:
    # The C++ code has waits of its own, in torch's handles and where ranks meet. It must know the deadline too.
    _C.timeout_variable.set(0 if settings.timeout is None else max(1, round(settings.timeout * 1000)))
    _settings.set(settings)


def changed(name: str, **changes: Any) -> Block:
    """Return a block with other values of some settings. ``name`` is the block's name in messages."""
    return Block(name, lambda outside: replace(outside, **changes))


def transformed(*transforms: Transform) -> Block:
    """Apply ``transforms`` to the functions that run the steps of every plan inside the block."""
    return Block("transformed", lambda outside: replace(outside, transforms=outside.transforms + transforms))


def without(*parts: str) -> Transform:
    """Return a transform that leaves steps out, to measure their cost. Results are then wrong. For benchmarks.

    Args:
        parts: the steps to leave out: "waits" (signals and waits), "copies".
    """
    kinds = {"waits": {"signal", "wait"}, "copies": {"publish", "pull", "push"}}
    dropped = frozenset().union(*(kinds[part] for part in parts))
    return lambda plan, table: {kind: function for kind, function in table.items() if kind not in dropped}


def integer(name: str, value: Any) -> int:
    """Return an argument as an int. Raises TypeError if it is none, such as 2.0. ``name`` is for the message."""
    try:
        return as_int(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, which is not an integer") from None
