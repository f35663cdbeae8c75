"""Settings of the ops: one immutable record. ``with`` blocks set it, and every call reads it once.

A field that is None has not been set. A backward pass runs under the settings of its forward pass. A block around
``backward()`` overrides them field by field, also if autograd runs the backward pass on a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import cache, cached_property
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from numbers import Real
from operator import index as as_int
from typing import Any, TypeVar

import torch

from . import _C
from ._torch import context_of_backward
from .plan import Plan, Table

Transform = Callable[[Plan, Table], Table]
"""Replaces the functions that run the steps of a plan, for example by functions that pause first. Tests, benchmarks and
profilers use it. The results of a program must not depend on it."""

PATHS = ("sequential", "pipelined", "fused", "c10d")
"""The paths that a program may force. `symm_overlap.collective.chooser` explains them."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LONGEST = 1e9  # seconds, 30 years: far from any overflow


@dataclass(frozen=True)
class Settings:
    """The settings of a program for its calls. None means: not set.

    Attributes:
        path, chunks, streams, span: see `force_path`.
        timeout: how many seconds one wait for a peer may last; see `timeout`.
        lane: see `lane`.
        order: see `sum_order`.
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
        return *self.forced, self.lane_index, self.compare

    @property
    def forced(self) -> tuple[Any, ...]:
        """The settings that must be the same on all ranks: path, chunks, streams, span, order."""
        return self.path, self.chunks, self.streams, self.span, self.order

    @cached_property
    def lane_index(self) -> int:
        """The lane to use."""
        return self.lane or 0

    @property
    def seconds(self) -> float:
        """The deadline of one wait, in seconds."""
        return self.timeout if self.timeout is not None else _C.timeout_ms_or_default(0) / 1000

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


def in_backward(forward: Settings) -> Settings:
    """Return the settings of a backward pass: those of the blocks around ``backward()``, else those of its forward
    pass.
    """
    here = _settings.get()
    if here is _NOTHING:  # this may be a thread of autograd, which does not have the caller's context
        context = context_of_backward()
        here = _NOTHING if context is None else context.get(_settings, _NOTHING)
    return here.with_defaults(forward)


class Block(ContextDecorator):
    """A block with settings of its own. One object may be entered again, also inside itself and in several threads, and
    may decorate functions.
    """

    def __init__(self, name: str, settings_inside: Callable[[Settings], Settings]) -> None:
        """``settings_inside`` returns the settings inside the block, given those outside of it."""
        self._name, self._settings_inside = name, settings_inside

    def __call__(self, function: _Function) -> _Function:
        if isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function):
            raise TypeError(
                f"symm_overlap.{self._name} cannot decorate {function.__qualname__}, because its body runs later than "
                "the call: put the block into the body"
            )
        return super().__call__(function)

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
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
    return Block("applied", lambda outside: settings)


def _set(settings: Settings) -> None:
    # The C++ code has waits of its own, in torch's handles and where ranks meet. It must know the deadline too.
    _C.set_thread_timeout_ms(0 if settings.timeout is None else max(1, round(settings.timeout * 1000)))
    _settings.set(settings)


def _changed(name: str, **changes: Any) -> Block:
    return Block(name, lambda outside: replace(outside, **changes))


def force_path(
    path: str | None, *, chunks: int | None = None, streams: int | None = None, span: int | None = None
) -> Block:
    """Force a path for the ops called inside the block, instead of the automatic choice.

    Use the same block on every rank. SYMM_OVERLAP_PATH does the same for a whole program.

    Args:
        path: "sequential", "pipelined", "fused" or "c10d". None keeps the automatic choice and overrides only the
            others. With "fused", an op runs as one kernel if there is such a kernel for it; otherwise it takes the
            path "pipelined". On CPU "fused" runs in Triton's interpreter, for tests, and needs TRITON_INTERPRET=1.
        chunks: number of chunks that each rank's part is cut into, at least 1. A part is never cut into more chunks
            than it has rows.
        streams: number of compute streams, 1 or 2. With 2, copies also get a stream of their own.
        span: how many peers' parts one matmul covers at most, at least 1, on the path "pipelined". There are as few
            matmuls as that allows, besides the one of the local part. It excludes more than 1 chunk. On CPU, a gather
            then copies the peers' parts. It has no effect on calls whose parts cannot be next to each other in memory:
            if the last dimension is gathered or scattered, if more than the product of one matmul is summed or kept, or
            if the size of a part is no multiple of 256 bytes.

    Raises:
        ValueError, TypeError: an argument is none of the allowed values.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    if path is not None and path not in PATHS:
        raise ValueError(f"force_path({path!r}): allowed are {', '.join(PATHS)}")
    chunks, streams, span = (None if each is None else as_int(each) for each in (chunks, streams, span))
    if chunks is not None and chunks < 1:
        raise ValueError(f"force_path: chunks is {chunks}; allowed are 1 and more")
    if streams not in (None, 1, 2):
        raise ValueError(f"force_path: streams is {streams}; allowed are 1 and 2")
    if span is not None and span < 1:
        raise ValueError(f"force_path: span is {span}; allowed are 1 and more")
    if (span or 1) > 1 and (chunks or 1) > 1:
        raise ValueError(f"force_path: chunks is {chunks} and span is {span}; only one of them may be more than 1")
    return _changed("force_path", path=path, chunks=chunks, streams=streams, span=span)


def timeout(seconds: float | timedelta) -> Block:
    """Set the deadline of every wait for a peer inside the block.

    A wait that exceeds its deadline raises `torch.distributed.DistBackendError`. The error names the op, group, rank,
    peer, channel, and the expected and found epoch. Outside of any block the deadline is SYMM_OVERLAP_TIMEOUT seconds,
    by default 300.

    Args:
        seconds: the deadline of one wait, in seconds or as a timedelta; above 0 and up to a billion seconds.

    Raises:
        ValueError: ``seconds`` is not in that range.
        TypeError: ``seconds`` is neither a number nor a timedelta.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    given = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    wrong = f"timeout({seconds!r}): a deadline is a number of seconds above 0 and up to {_LONGEST:.0f}, or a timedelta"
    if not isinstance(given, Real):
        raise TypeError(wrong)
    if not 0 < given <= _LONGEST:
        raise ValueError(wrong)
    return _changed("timeout", timeout=float(given))


def lane(index: int) -> Block:
    """Run the ops called inside the block on lane ``index``.

    Ops on different lanes may overlap in time, from several threads or CUDA streams. Ops on one lane run one after
    another, and all ranks must call them in the same order. Outside of any block the lane is 0.

    On CUDA, lanes other than 0 need ranks that can reach each other's memory. Use each lane for the first time (or
    `prepare` it) in the same order on every rank. If ranks call ops on different lanes in different orders, set
    CUDA_DEVICE_MAX_CONNECTIONS=32.

    Args:
        index: any int from 0 on. Ops that belong together must use the same index on every rank.

    Raises:
        ValueError: ``index`` is negative.
        TypeError: ``index`` is not an int.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    if as_int(index) < 0:
        raise ValueError(f"lane({index}): lanes are numbered from 0")
    return _changed("lane", lane=as_int(index))


def sum_order(order: str) -> Block:
    """Set the order in which sums over ranks are computed inside the block.

    Use the same block on every rank. With "rank", ranks are added up in rank order, and every run returns the same bits
    on every path. With "any", a reduction that is not cut into chunks is one collective of the library behind
    torch.distributed (NCCL or gloo): on GPUs, and whenever the call goes through torch.distributed. NCCL's collective
    rounds after every addition, and may return other bits in another run or with another number of nodes. Calls that
    take another path, such as all calls on CPU ranks of one host, add up in rank order in either case.

    Args:
        order: "rank", which is also the order outside of any block, or "any".

    Raises:
        ValueError: ``order`` is neither.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    if order not in ("rank", "any"):
        raise ValueError(f"sum_order({order!r}): allowed are 'rank' and 'any'")
    return _changed("sum_order", order=order)


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
