"""Settings of the ops: one immutable record, which ``with`` blocks set and every call reads once.

A field that is None has not been set. Backward passes run under the settings of their forward pass, and a block around
``backward()`` overrides them field by field, also where autograd runs the backward pass on a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from operator import index as as_int
from typing import Any

import torch

from . import _C
from ._torch import context_of_backward
from .plan import Plan, Table

Transform = Callable[[Plan, Table], Table]
"""Replaces the functions that run the steps of a plan, for example by ones that pause first. Tests, benchmarks and
profilers use it; what a program computes must not depend on it."""

PATHS = ("sequential", "pipelined", "fused", "c10d")
"""The paths that a program may force. `symm_overlap.collective.chooser` explains them."""

_LONGEST = 1e9  # seconds, 30 years: far from any overflow


@dataclass(frozen=True)
class Settings:
    """What a program has set for its calls. None means: not set.

    Attributes:
        path, chunks, streams: see `force_path`.
        timeout: seconds that one wait for a peer may last; see `timeout`.
        lane: see `lane`.
        order: see `sum_order`.
        compare: whether every call is compared on all ranks before it starts (SYMM_OVERLAP_CHECK).
        transforms: see `Transform`; the first one is applied first.
        needs: where calls note what they need, instead of being carried out; see
            `symm_overlap.collective.exchange.needs`.
    """

    path: str | None = None
    chunks: int | None = None
    streams: int | None = None
    timeout: float | None = None
    lane: int | None = None
    order: str | None = None
    compare: bool | None = None
    transforms: tuple[Transform, ...] = ()
    needs: Any = None

    def over(self, other: Settings) -> Settings:
        """These settings, and those of ``other`` where these have not been set."""
        if self == _NOTHING:
            return other
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in mine.items() if value not in (None, ())})

    @cached_property
    def routing(self) -> tuple[Any, ...]:
        """What decides how a call is carried out, besides the environment: calls look up what is known by it."""
        return *self.forced, self.lane_index, self.compare

    @property
    def forced(self) -> tuple[Any, ...]:
        """What ranks must have set alike: path, chunks, streams, order."""
        return self.path, self.chunks, self.streams, self.order

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
        """Whether every call is compared on all ranks before it starts."""
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


@cache
def environment() -> Settings:
    """What the environment sets for the whole program, read at the first call of an op. (The C++ side reads
    SYMM_OVERLAP_TIMEOUT.)
    """
    compare = os.environ.get("SYMM_OVERLAP_CHECK", "0") not in ("", "0")
    return Settings(path=os.environ.get("SYMM_OVERLAP_PATH") or None, compare=compare)


def current() -> Settings:
    """The settings that the blocks around the caller have made."""
    return _settings.get()


def in_backward(forward: Settings) -> Settings:
    """The settings of a backward pass: the blocks around ``backward()``, and else those of the forward pass."""
    here = _settings.get()
    if here is _NOTHING:  # perhaps a thread of autograd's, which does not have the caller's context
        context = context_of_backward()
        here = _NOTHING if context is None else context.get(_settings, _NOTHING)
    return here.over(forward)


@contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Use exactly these settings inside the block."""
    token = _apply(settings)
    try:
        yield
    finally:
        _restore(token)


def _apply(settings: Settings) -> Token[Settings]:
    # The C++ side has waits of its own, in torch's handles and where ranks meet: it must know the deadline too.
    _C.set_thread_timeout_ms(0 if settings.timeout is None else max(1, round(settings.timeout * 1000)))
    return _settings.set(settings)


def _restore(token: Token[Settings]) -> None:
    _settings.reset(token)
    before = _settings.get().timeout
    _C.set_thread_timeout_ms(0 if before is None else max(1, round(before * 1000)))


def _changed(block: str, **changes: Any) -> Any:
    if torch.compiler.is_compiling():
        raise RuntimeError(f"symm_overlap.{block} inside a compiled function has no effect: put it around the call")
    return applied(replace(current(), **changes))


@contextmanager
def force_path(path: str | None, *, chunks: int | None = None, streams: int | None = None) -> Iterator[None]:
    """Override the choice of a path for the ops called inside the block; do it alike on every rank.

    SYMM_OVERLAP_PATH does the same for a whole program.

    Args:
        path: "sequential", "pipelined", "fused" or "c10d"; None keeps the choice and overrides only what follows.
            "fused" is one kernel for an op that has one, and "pipelined" for any other. On a CPU it runs in Triton's
            interpreter, for tests, and needs TRITON_INTERPRET=1.
        chunks: pieces that each rank's part is cut into, at least 1. A part is never cut into more pieces than it has
            rows.
        streams: compute streams, 1 or 2; with 2, copies get a stream of their own too.

    Raises:
        ValueError, TypeError: an argument is none of these.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    if path is not None and path not in PATHS:
        raise ValueError(f"force_path({path!r}): allowed are {', '.join(PATHS)}")
    if chunks is not None and as_int(chunks) < 1:
        raise ValueError(f"force_path: chunks is {chunks}; allowed are 1 and more")
    if streams not in (None, 1, 2):
        raise ValueError(f"force_path: streams is {streams}; allowed are 1 and 2")
    with _changed("force_path", path=path, chunks=chunks, streams=streams):
        yield


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Set the deadline of every wait for a peer inside the block.

    A wait past its deadline raises `torch.distributed.DistBackendError`, which names the op, group, rank, peer, channel
    and the expected and found epoch. Outside any block the deadline is SYMM_OVERLAP_TIMEOUT seconds, by default 300.

    Args:
        seconds: the deadline of one wait, in seconds; above 0 and up to a billion.

    Raises:
        ValueError: ``seconds`` is not in that range.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"timeout({seconds}): a deadline is a number of seconds above 0 and up to {_LONGEST:.0f}")
    with _changed("timeout", timeout=float(seconds)):
        yield


@contextmanager
def lane(index: int) -> Iterator[None]:
    """Run the ops called inside the block on lane ``index``.

    Ops on different lanes may overlap in time, from several threads or CUDA streams. On one lane they follow one
    another, and all ranks must issue them in the same order. Outside any block the lane is 0.

    Args:
        index: any int from 0 on; the same on every rank for ops that belong together. On CUDA, lanes need ranks that
            can reach each other's memory; first use each lane (or `prepare` it) in one order on every rank, and set
            CUDA_DEVICE_MAX_CONNECTIONS=32 if ranks issue ops on different lanes in different orders.

    Raises:
        ValueError: ``index`` is negative. TypeError: it is no int.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    if as_int(index) < 0:
        raise ValueError(f"lane({index}): lanes are numbered from 0")
    with _changed("lane", lane=as_int(index)):
        yield


@contextmanager
def sum_order(order: str) -> Iterator[None]:
    """Set in which order sums over ranks are made inside the block; do it alike on every rank.

    In the order of ranks every run gives the same bits, on every path. In any order a reduction that is not cut into
    chunks is the collective of torch.distributed's library on GPUs, and wherever it goes through torch.distributed.
    NCCL's rounds after every addition, and may give other bits in another run, or with another number of nodes. Calls
    that take another path, such as all on CPU ranks of one host, are in the order of ranks in either case.

    Args:
        order: "rank", as outside of any block, or "any".

    Raises:
        ValueError: ``order`` is neither.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    if order not in ("rank", "any"):
        raise ValueError(f"sum_order({order!r}): allowed are 'rank' and 'any'")
    with _changed("sum_order", order=order):
        yield


@contextmanager
def transformed(*transforms: Transform) -> Iterator[None]:
    """Apply ``transforms`` to the functions that run the steps of every plan inside the block."""
    with _changed("transformed", transforms=current().transforms + transforms):
        yield


def without(*parts: str) -> Transform:
    """A transform that leaves steps out, to measure what they cost; results are then wrong. For benchmarks.

    Args:
        parts: "waits" (signals and waits), "copies".
    """
    kinds = {"waits": {"signal", "wait"}, "copies": {"publish", "pull", "push"}}
    dropped = frozenset().union(*(kinds[part] for part in parts))
    return lambda plan, table: {kind: function for kind, function in table.items() if kind not in dropped}
