"""Conditions under which a function runs on the ranks of a GPU test: paths, sleeps before steps, torch's sanitizer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import Transform, transformed
from tests.ranks import Rank

Path = tuple[str | None, int | None, int | None]
"""A path, its number of chunks, and its number of compute streams."""

PATHS: list[Path] = [
    (None, None, None),
    ("sequential", None, None),
    ("pipelined", 1, 1),
    ("pipelined", 1, 2),
    ("pipelined", 2, 2),
    ("pipelined", 4, 2),
    ("fused", 1, None),
    ("fused", 2, None),
    ("c10d", 1, None),
    ("c10d", 2, None),
]

LONGEST_SLEEP = 200e-6
"""Seconds. This is longer than a launch, so that streams and ranks really change their order."""

_CYCLES = 1.5e9  # cycles of a GPU's clock in a second, approximately


def on_path(path: Path) -> AbstractContextManager[None]:
    """Force a path inside a block."""
    name, chunks, streams = path
    return symm_overlap.force_path(name, chunks=chunks, streams=streams)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a function runs.

    Attributes:
        sleeps: the seed for sleeps of random length before every step of every plan, or None for no sleeps.
        sanitizer: whether torch's sanitizer looks for accesses by two streams that are not ordered by an event.
    """

    sleeps: int | None = None
    sanitizer: bool = False


def run_under(me: Rank, conditions: Conditions, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(me, *args, **kwargs)``, wait for the device, and check that no lane has failed."""
    transforms: list[Transform] = []
    if conditions.sanitizer and me.device.type == "cuda":
        transforms.append(seen_by(_sanitizer()))
    if conditions.sleeps is not None:
        transforms.append(random_sleeps(me.device, f"{conditions.sleeps} {me.rank}"))
    with transformed(*transforms):
        result = function(me, *args, **kwargs)
        finish(me)
    symm_overlap.raise_failures()
    if me.device.type == "cuda":
        torch.cuda.empty_cache()  # ranks live for the whole session, and all of them may share one GPU
    return result


def finish(me: Rank) -> None:
    """Wait until the device has finished all its work."""
    if me.device.type == "cuda":
        torch.cuda.synchronize()


def around_steps(scope: Callable[[Step], AbstractContextManager[object]]) -> Transform:
    """Return a transform that enters a scope around every step."""

    def run(function: Callable[[Step], object], step: Step) -> object:
        with scope(step):
            return function(step)

    def transform(plan: Plan, table: Table) -> Table:
        return {kind: partial(run, function) for kind, function in table.items()}

    return transform


def random_sleeps(device: torch.device, seed: str) -> Transform:
    """Return a transform that lets a step's stream (on CPU, its thread) sleep before every step."""
    chance = random.Random(seed)

    @contextmanager
    def asleep(step: Step) -> Iterator[None]:
        seconds = chance.uniform(0, LONGEST_SLEEP)
        if device.type == "cuda":
            torch.cuda._sleep(round(seconds * _CYCLES))
        else:
            time.sleep(seconds)
        yield

    return around_steps(asleep)


def seen_by(mode: AbstractContextManager[object]) -> Transform:
    """Return a transform with which a dispatch mode sees the calls of the steps, in addition to the op itself."""
    return around_steps(lambda step: mode)


def _sanitizer() -> AbstractContextManager[object]:
    """Enable torch's sanitizer and return its dispatch mode.

    It cannot be enabled by the environment variable. That would start CUDA in the fork server of the ranks, and CUDA
    does not work in a forked process after that.
    """
    from torch.cuda import _sanitizer as module

    if not module.cuda_sanitizer.enabled:
        module.enable_cuda_sanitizer()
    mode: AbstractContextManager[object] = module.cuda_sanitizer.dispatch
    return mode


def error_of(me: Rank, call: Callable[[], torch.Tensor]) -> str:
    """Make a call that cannot succeed, and return its error message.

    On CPU the call raises. On a GPU it may only fill its output with NaN, because kernels cannot raise. Then the next
    check of the lanes raises.
    """
    output = None
    try:
        output = call()
        finish(me)
        symm_overlap.raise_failures()
    except dist.DistBackendError as error:
        assert output is None or bool(output.isnan().all())
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError(f"the call succeeded, but it should have failed: {output}")
