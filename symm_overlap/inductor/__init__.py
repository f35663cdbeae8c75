"""The ops in compiled models: ``torch.compile(model, options=symm_overlap.inductor.options())``.

Collectives and matmuls that torch.compile finds beside each other, in models that use DTensor's tensor parallelism or
functional collectives, become the ops of this package, forward and backward. docs/compile.md shows what is matched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._torch import PASS_OPTION, configured_pass, set_pass, with_pass
from .custom_pass import Choices, NotFusedError, OverlapPass
from .report import GraphReport, Report, Site, clear, report

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


def options(*, strict: bool = False) -> dict[str, Any]:
    """Options for `torch.compile`, which fuse what is compiled with them::

        compiled = torch.compile(model, options=symm_overlap.inductor.options())

    A pass that is configured already (``torch._inductor.config.post_grad_custom_pre_pass``) runs first, as before.

    Args:
        strict: raise `NotFusedError` where a collective beside a matmul cannot be fused, or a graph has none.
    """
    return {PASS_OPTION: _new_pass(strict)}


@contextmanager
def enabled(*, strict: bool = False) -> Iterator[None]:
    """Fuse everything that is compiled inside the block: the first call of a compiled model belongs inside.

    Backward graphs are compiled together with their forward graphs, so ``backward()`` may come after the block.

    Args:
        strict: see `options`.
    """
    with with_pass(_new_pass(strict)):
        yield


def enable(*, strict: bool = False) -> None:
    """Fuse everything that this program compiles from now on. A second call changes ``strict``.

    Args:
        strict: see `options`.
    """
    set_pass(_new_pass(strict))


def disable() -> None:
    """Take back `enable`. What has been compiled stays as it is."""
    before = configured_pass()
    if isinstance(before, OverlapPass):
        set_pass(before.before)


def _new_pass(strict: bool) -> OverlapPass:
    before = configured_pass()
    if isinstance(before, OverlapPass):  # of an enable() or a block around: twice would find nothing
        before = before.before
    return OverlapPass(Choices(strict), before)
