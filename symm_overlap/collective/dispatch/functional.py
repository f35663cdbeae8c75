"""The public function in front of an op: it accepts groups of any kind, and raises errors that a user can read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from ..._torch import compiling
from ...settings import current
from ..arguments import group_name
from ..exchange import Peers
from ..exchange.comparison import REJECTIONS, report_rejection
from .registration import calls, for_users

_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])


def functional(wrapper: _Wrapper) -> _Wrapper:
    """Return a function that calls an op and accepts a ``group`` of any kind.

    With SYMM_OVERLAP_CHECK=1, peers are also notified when this function or the dispatcher rejects the call.
    """
    bind = inspect.signature(wrapper).bind

    @wraps(wrapper)
    def run(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return wrapper(*args, **kwargs)
        kernels = getattr(calls, "kernels", 0)
        try:
            return wrapper(*args, **kwargs)
        except Exception as error:
            found = _dispatcher_error(wrapper.__name__, error)
            if kernels == getattr(calls, "kernels", 0) and isinstance(found, REJECTIONS):
                _count_rejection(wrapper.__name__, bind, args, kwargs, found)
            raise for_users(found) from (error.__cause__ if found is error else None)

    return cast(_Wrapper, run)


def _count_rejection(
    op: str, bind: Callable[..., inspect.BoundArguments], args: Any, kwargs: Any, error: Exception
) -> None:
    """Count a call that was rejected before it reached a kernel, and notify the peers."""
    try:
        peers = Peers(group_name(bind(*args, **kwargs).arguments["group"]), current())
    except (*REJECTIONS, RuntimeError):  # there is no such group
        return
    report_rejection(op, peers, error)


def _dispatcher_error(name: str, error: Exception) -> Exception:
    """Convert the dispatcher's error about an argument of a wrong type, or a device without a kernel, to a TypeError.

    Any other error is returned as it is.
    """
    text = str(error)
    if isinstance(error, RuntimeError):
        if text.startswith("symm_overlap::"):
            # The lines after the first show the argument's value, with all the numbers of a tensor.
            return TypeError(text.partition("\n")[0])
        if isinstance(error, NotImplementedError) and "symm_overlap::" in text:
            return TypeError(f"{name} takes tensors on CPU or CUDA: {text.split('. ')[0]}")
    return error
