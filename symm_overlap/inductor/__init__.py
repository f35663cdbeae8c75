"""The ops in compiled models: ``torch.compile(model, options=symm_overlap.inductor.options())``.

Collectives and matmuls that torch.compile finds beside each other, in models that use DTensor's tensor parallelism or
functional collectives, become the ops of this package, forward and backward. docs/compile.md shows what is matched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._torch import PASS_OPTION, configured_pass, set_pass, with_pass
from .cached import report
from .choices import Choices, checked_settings
from .custom_pass import NotFusedError, OverlapPass
from .report import GraphReport, Report, Site, clear

__all__ = [
    "GraphReport",
    "NotFusedError",
    "Report",
    "Site",
    "clear",
    "disable",
    "enable",
    "enabled",
    "options",
    "report",
]


def options(
    *,
    strict: bool = False,
    small: bool = False,
    path: str | None = None,
    chunks: int | None = None,
    streams: int | None = None,
    timeout: float | None = None,
    lane: int | None = None,
) -> dict[str, Any]:
    """Options for `torch.compile`, which fuse what is compiled with them::

        compiled = torch.compile(model, options=symm_overlap.inductor.options())

    A pass that is configured already (``torch._inductor.config.post_grad_custom_pre_pass``) runs first, as before.

    Args:
        strict: raise `NotFusedError` where a collective beside a matmul cannot be fused, or a graph has none.
        small: fuse also what the chooser would carry out with the collectives of torch.distributed, where nothing is
            gained: small gathers on GPUs (`symm_overlap.explain`).
        path, chunks, streams: see `symm_overlap.force_path`; for the ops that the pass writes.
        timeout: see `symm_overlap.timeout`; likewise.
        lane: see `symm_overlap.lane`; likewise. A block around the call of the compiled model overrides these.

    Raises:
        ValueError, TypeError: a setting is out of its range.
    """
    settings = checked_settings(path, chunks, streams, timeout, lane)
    return {PASS_OPTION: _new_pass(Choices(strict, small, settings))}


@contextmanager
def enabled(**choices: Any) -> Iterator[None]:
    """Fuse everything that is compiled inside the block: the first call of a compiled model belongs inside.

    Backward graphs are compiled together with their forward graphs, so ``backward()`` may come after the block.

    Args:
        choices: as for `options`.
    """
    with with_pass(options(**choices)[PASS_OPTION]):
        yield


def enable(**choices: Any) -> None:
    """Fuse everything that this program compiles from now on. A second call changes the choices.

    Args:
        choices: as for `options`.
    """
    set_pass(options(**choices)[PASS_OPTION])


def disable() -> None:
    """Take back `enable`. What has been compiled stays as it is."""
    before = configured_pass()
    if isinstance(before, OverlapPass):
        set_pass(before.before)


def _new_pass(choices: Choices) -> OverlapPass:
    before = configured_pass()
    if isinstance(before, OverlapPass):  # of an enable() or a block around: twice would find nothing
        before = before.before
    return OverlapPass(choices, before)
