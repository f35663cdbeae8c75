"""Refuse gradients of the model's own around whole modules: the tracer records forwards alone.

A stage would compute the forward of a ``torch.autograd.Function``, and torch's gradients of the operators in it. The
hook of a tensor would not run at all. And no tensor requires gradients while the tracer runs, whatever its layers do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from .error import PassedError, TraceError


def require_no_backward_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Check that the modules around the layers have no backward hooks, which would not run.

    Raises:
        TraceError: one has.
    """
    for name, module in modules.items():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"{name or 'the model itself'} ({type(module).__name__}) has a backward hook, which would not run: no "
                "stage has all of the module. Register it on layers, or on modules without layers inside"
            )


class RefusedGradients:
    """While it is open, `torch.autograd.Function`, ``Tensor.register_hook`` and a look at ``Tensor.requires_grad`` are
    errors, except in a block of `permitted`.

    Functions of torch itself change no gradients, except if they communicate. Torch may look at all tensors, and the
    model at its parameters. A reentrant checkpoint becomes one that is not.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._thread = threading.get_ident()  # others may compute something else
        self._apply = vars(torch.autograd.Function)["apply"]
        self._register_hook = Tensor.register_hook

    def __enter__(self) -> None:
        apply, register_hook = self._apply, self._register_hook

        def apply_or_refuse(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if function is CheckpointFunction and self._is_refused():  # its layers would be without gradients
                run, preserve_rng_state, *given = args
                return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=preserve_rng_state)
            own = not function.__module__.startswith("torch.") or function.__module__.startswith("torch.distributed.")
            if own and torch.is_grad_enabled():
                self._require_allowed(f"applies {function.__qualname__}, a torch.autograd.Function")
            return apply.__get__(None, function)(*args, **kwargs)  # from torch 2.14 on, it has no `__func__`

        def register_or_refuse(tensor: Tensor, hook: Any) -> Any:
            self._require_allowed("calls Tensor.register_hook")
            return register_hook(tensor, hook)  # type: ignore[no-untyped-call]

        torch.autograd.Function.apply = classmethod(apply_or_refuse)  # type: ignore[method-assign, assignment]
        requires_grad: Any = Tensor.requires_grad

        def look_or_refuse(tensor: Tensor) -> bool:
            by = str(sys._getframe(1).f_globals.get("__name__"))
            if not isinstance(tensor, nn.Parameter) and not by.startswith(("torch.", str(__package__))):
                self._require_allowed("looks at Tensor.requires_grad", "which is False while it is traced")
            return bool(requires_grad.__get__(tensor))

        Tensor.register_hook = register_or_refuse  # type: ignore[method-assign]
        Tensor.requires_grad = property(look_or_refuse, requires_grad.__set__)  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        Tensor.register_hook = self._register_hook  # type: ignore[method-assign]
        del Tensor.requires_grad  # the one that it inherits is back

    @contextmanager
    def permitted(self) -> Iterator[None]:
        """A block in which they are no errors: what runs in it is not between layers."""
        self._allowed = True
        try:
            yield
        finally:  # the model may catch what a layer raises
            self._allowed = False

    def _is_refused(self) -> bool:
        return not self._allowed and threading.get_ident() == self._thread

    def _require_allowed(self, what: str, reason: str = "where the tracer would lose the backward") -> None:
        if self._is_refused():
            raise PassedError(
                f"the model {what}, between its layers, {reason}: move that into a module that has no layers inside, "
                "or cut without tracing (trace=False)"
            )
