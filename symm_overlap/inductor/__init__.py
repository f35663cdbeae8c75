"""The ops in compiled models: ``torch.compile(model, options=symm_overlap.inductor.options())``.

The pass is for models that use DTensor's tensor parallelism or functional collectives. It replaces each collective and
the matmuls beside it by ops of this package, forward and backward. docs/compile.md shows what is matched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._torch import PASS_OPTION, configured_pass, options_of, pads, set_pass, with_pass
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
    merge_sums: bool = True,
    path: str | None = None,
    chunks: int | None = None,
    streams: int | None = None,
    span: int | None = None,
    timeout: float | None = None,
    lane: int | None = None,
) -> dict[str, Any]:
    """Return options for `torch.compile` that fuse collectives and matmuls in the compiled model::

        compiled = torch.compile(model, options=symm_overlap.inductor.options())

    A pass that is configured already (``torch._inductor.config.post_grad_custom_pre_pass``) still runs, and runs first.
    Inductor does not pad the sizes of matmuls (``shape_padding``), which on GPUs it decides on each rank by measuring.

    Args:
        strict: raise `NotFusedError` if a collective beside a matmul cannot be fused, or if a graph has none.
        small: also fuse small gathers on GPUs. For these the chooser would use the collectives of torch.distributed, so
            nothing is gained (`symm_overlap.explain`).
        merge_sums: if the results of several reductions are added, add their inputs instead, and reduce the sum. The
            results differ by rounding.
        path, chunks, streams, span: see `symm_overlap.force_path`. These and the next two apply to the ops that the
            pass writes. A block around the call of the compiled model overrides them.
        timeout: seconds, see `symm_overlap.timeout`.
        lane: see `symm_overlap.lane`.

    Raises:
        ValueError, TypeError: a setting is out of its range.
    """
    settings = checked_settings(path, chunks, streams, span, timeout, lane)
    return options_of(_new_pass(Choices(strict, small, merge_sums, settings)))


@contextmanager
def enabled(**choices: Any) -> Iterator[None]:
    """Fuse everything that is compiled inside the block. Put the first call of a compiled model inside the block.

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
    """Undo `enable`. Graphs that are compiled already stay as they are."""
    before = configured_pass()
    if isinstance(before, OverlapPass):
        set_pass(before.before, padding=before.padding)


def _new_pass(choices: Choices) -> OverlapPass:
    before = configured_pass()
    if isinstance(before, OverlapPass):  # set by enable() or by an outer block; a second pass would find nothing
        return OverlapPass(choices, before.before, before.padding)
    return OverlapPass(choices, before, pads())
