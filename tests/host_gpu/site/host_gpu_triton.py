"""Triton's kernels in its interpreter, run in device memory by the thread of the stream.

While the interpreter runs, it replaces parts of Triton's language in the whole process, so it can run only one kernel
at a time.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from host_gpu_streams import Place, enqueue, is_cuda

POLLS_PER_SECOND = 3000
"""About as many polls as the interpreter makes. It has no clock, so limits are counted in polls."""

_interpreting = threading.Lock()


@dataclass(frozen=True)
class Described:
    """A tensor descriptor with the place of its tensor instead of the tensor."""

    base: Place
    rest: tuple[Any, ...]


def change(module: ModuleType) -> None:
    """Change Triton's interpreter, or let the package treat its kernels as compiled ones, which round as GPUs do."""
    if module.__name__ == "symm_overlap.kernels.device":
        module.INTERPRETED = False
    elif module.__name__ == "symm_overlap.kernels.rounding":
        # The bits of the largest numbers. GPUs convert numbers that are too large for float8 to these.
        module.BEYOND_E4M3, module.INFINITY_E5M2 = module.tl.constexpr(0x7E), module.tl.constexpr(0x7B)
    else:
        _change_interpreter(module)


def _change_interpreter(module: ModuleType) -> None:
    descriptor = module.TensorDescriptor
    interpret = module.GridExecutor.__call__

    def each(x: Any, function: Callable[[Any], Any]) -> Any:
        """Apply a function to ``x``, or to all items in it if it is a tuple."""
        if isinstance(x, tuple):
            items = [each(item, function) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        return function(x)

    def place(x: Any) -> Any:
        if isinstance(x, descriptor):
            return Described(Place(x.base), (x.shape, x.strides, x.block_shape, x.padding))
        return Place(x) if is_cuda(x) else x

    def tensor(x: Any) -> Any:
        if isinstance(x, Described):
            return descriptor(x.base.tensor(), *x.rest)
        return x.tensor() if isinstance(x, Place) else x

    def launch(executor: Any, *arguments: Any, **options: Any) -> None:
        names = inspect.getfullargspec(executor.fn).args
        given = inspect.getcallargs(
            executor.fn, *arguments, **{name: x for name, x in options.items() if name in names}
        )
        at = {name: each(x, place) for name, x in given.items()}
        there = lambda: {name: each(x, tensor) for name, x in at.items()}  # noqa: E731
        # The package passes the arguments for a compiled kernel. The interpreter needs these values instead.
        at |= {name: value for name, value in (("CLOCK", False), ("INTERPRETED", True)) if name in at}
        if "limit" in at:
            at["limit"] = max(1, int(at["limit"] / 1e9 * POLLS_PER_SECOND))

        def work() -> None:
            with _interpreting:
                interpret(executor, **there())

        enqueue(work)

    # Tensors in device memory need no copies, because device memory is memory of the host.
    module.GridExecutor._init_args_hst = lambda executor, arguments, options: (list(arguments), dict(options))
    module.GridExecutor._restore_args_dev = lambda executor, *ignored: None
    module.GridExecutor.__call__ = launch
