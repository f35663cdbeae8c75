"""Records which bytes each step of a plan really touches, and compares them with what the plan declares and orders.

`symm_overlap.plan.verify` proves that the declared accesses of a plan do not race. It cannot see an access that a plan
does not declare: a tensor that one step caches for a later step, or a write beside the declared region. A `Recorder`
sees them. It runs every step under a dispatch mode, which sees what torch's operators read and write, and wraps the
functions of the C++ extension, inside which a mode cannot look::

    recorder = Recorder()
    with watching_extension(), transformed(recorder):
        symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, group)
    assert not recorder.problems()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import numpy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from symm_overlap import _C
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.runtime.cpu.backend import CpuBackend

# Operators that use only a tensor's shape, dtype and device.
SHAPES_ONLY = {f"aten::{name}" for name in ("new_empty", "new_empty_strided", "empty_like", "new_zeros", "zeros_like")}

_here = threading.local()  # .step, set while this thread runs a step: the run, and the index of the step


class Span(NamedTuple):
    """Bytes from ``start`` to ``stop`` that a step has touched."""

    start: int
    stop: int
    step: int
    writes: bool
    by: str


def bytes_of(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the addresses of a tensor's elements, as intervals of bytes."""
    if tensor.numel() == 0:
        return []
    base, size = tensor.data_ptr(), tensor.element_size()
    return [(base + size * start, base + size * stop) for start, stop in _elements(tensor.shape, tensor.stride())]


@lru_cache(maxsize=4096)
def _elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the offsets of a tensor's elements, as intervals."""
    offsets = numpy.zeros(1, dtype=numpy.int64)
    for length, stride in zip(shape, strides, strict=True):
        offsets = numpy.add.outer(offsets, stride * numpy.arange(length)).reshape(-1)
    offsets = numpy.unique(offsets)
    gaps = numpy.flatnonzero(numpy.diff(offsets) > 1)
    starts = offsets[numpy.concatenate(([0], gaps + 1))]
    stops = offsets[numpy.concatenate((gaps, [len(offsets) - 1]))] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


class Run:
    """One run of a plan, with the memory that each of its steps touched."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.index = {id(step): index for index, step in enumerate(plan.steps)}
        self.spans: list[Span] = []
        self.allocated: list[tuple[int, int, int]] = []  # (start, stop, step that allocated this memory)
        self.noted: set[tuple[int, bool]] = set()  # (step, whether it writes), also of empty tensors
        self._kept: list[Tensor] = []  # kept alive, so that no address is used twice in a run

    def note(self, step: int, tensors: Iterable[object], writes: bool, by: str) -> None:
        """Note that a step reads or writes these tensors."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._kept.append(tensor)
                self.noted.add((step, writes))
                self.spans += [Span(start, stop, step, writes, by) for start, stop in bytes_of(tensor)]

    def note_new(self, step: int, tensor: Tensor) -> None:
        """Note that a step has created this tensor."""
        self._kept.append(tensor)
        storage = tensor.untyped_storage()
        self.allocated.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), step))

    def note_operator(self, step: int, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note that a step has called an operator of torch."""
        schema = operator._schema
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = {
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        }
        storages = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(given) if isinstance(tensor, Tensor)}
        results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        new = [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in storages]
        for tensor in new:
            self.note_new(step, tensor)
        if schema.name in SHAPES_ONLY or (results and not new and not written):  # the latter create only views
            return
        for name, value in given.items():
            self.note(step, tree_leaves(value), name in written, schema.name)
        self.note(step, new, True, schema.name)

    def problems(self) -> list[str]:
        """Describe every difference between the accesses of the steps and the plan."""
        return [*dict.fromkeys(chain(self._unseen(), self._borrowed(), self._undeclared()))]

    def _unseen(self) -> Iterator[str]:
        """Find steps whose declared accesses have not been seen. The recorder is blind for these steps."""
        for index, step in enumerate(self.plan.steps):
            for regions, writes in ((step.reads, False), (step.writes, True)):
                if regions and step.kind not in ("fork", "join") and (index, writes) not in self.noted:
                    yield f"{step}: it declares that it {'writes' if writes else 'reads'}, and nothing was seen"

    def _borrowed(self) -> Iterator[str]:
        for start, stop, maker in self.allocated:
            for span in self.spans:
                if span.step != maker and span.start < stop and start < span.stop:
                    steps = self.plan.steps
                    yield f"{steps[span.step]}: {span.by} touches memory that was made inside {steps[maker]}"

    def _undeclared(self) -> Iterator[str]:
        before, steps = _order(self.plan), self.plan.steps
        for one, other in self._meetings():
            first, second = sorted((one, other), key=lambda span: span.step)
            how = f"{steps[first.step]} ({first.by}) and {steps[second.step]} ({second.by}) touch the same bytes"
            if not before[second.step] >> first.step & 1:
                yield f"{how}: unordered"
            if not _units(steps[first.step], first.writes) & _units(steps[second.step], second.writes):
                yield f"{how}: undeclared"

    def _meetings(self) -> Iterator[tuple[Span, Span]]:
        """Yield pairs of accesses of two steps to the same bytes. At least one of the two writes."""
        active: list[Span] = []
        seen = set()
        for span in sorted(self.spans):
            active = [other for other in active if other.stop > span.start]
            for other in active:
                pair = (other.step, other.writes, span.step, span.writes)
                if other.step != span.step and (other.writes or span.writes) and pair not in seen:
                    seen.add(pair)
                    yield other, span
            active.append(span)


def _order(plan: Plan) -> list[int]:
    """Return for each step the bit set of the steps that precede it."""
    before: list[int] = []
    last: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        bits = 0
        for earlier in (*step.after, *([last[step.stream]] if step.stream in last else [])):
            bits |= before[earlier] | 1 << earlier
        before.append(bits)
        last[step.stream] = index
    return before


def _units(step: Step, writes: bool) -> set[tuple[str, int, int]]:
    """Return the units that a step may write (with ``writes``), or may touch at all."""
    regions = step.writes if writes else step.reads + step.writes
    return {(region.buffer, region.rank, unit) for region in regions for unit in range(region.start, region.stop)}


class _Mode(TorchDispatchMode):
    """Reports to a run what one step does. A mode belongs to a thread, so each step enters one in its own thread."""

    def __init__(self, run: Run, step: int) -> None:
        super().__init__()
        self.run, self.step = run, step

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.run.note_operator(self.step, operator, args, kwargs or {}, result)
        return result


class Recorder:
    """A transform that records what the steps of every plan touch (`symm_overlap.settings.transformed`)."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def __call__(self, plan: Plan, table: Table) -> Table:
        run = Run(plan)
        self.runs.append(run)

        def watched(function: Callable[[Step], object]) -> Callable[[Step], object]:
            def run_step(step: Step) -> object:
                index = run.index[id(step)]
                _here.step = run, index
                try:
                    with _Mode(run, index):
                        return function(step)
                finally:
                    del _here.step

            return run_step

        return {kind: watched(function) for kind, function in table.items()}

    def problems(self) -> list[str]:
        """Return the problems of every run so far. Forget the runs and release their memory."""
        found = [f"{run.plan.op}: {problem}" for run in self.runs for problem in run.problems()]
        self.runs.clear()
        return found


def _noted(function: Callable[..., Any], reads: Callable[..., list[Any]], writes: Callable[..., list[Any]]) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (here := getattr(_here, "step", None)) is not None:
            run, step = here
            run.note(step, reads(*args, **kwargs), False, function.__name__)
            run.note(step, writes(*args, **kwargs), True, function.__name__)
        result = function(*args, **kwargs)
        if here is not None and isinstance(result, Tensor):
            run.note_new(step, result)
        return result

    return call


@contextmanager
def watching_extension() -> Iterator[None]:
    """Inside, functions of the C++ extension that touch tensors report to the run of the step that calls them."""
    with ExitStack() as patches:

        def watch(place: Any, name: str, reads: Callable[..., list[Any]], writes: Callable[..., list[Any]]) -> None:
            noted = _noted(getattr(place, name), reads, writes)
            patches.enter_context(mock.patch.object(place, name, noted))

        multiply = _noted(
            _C.multiply,
            lambda a, b, out, add=False, bias=None: [a, b] if bias is None else [a, b, bias],
            lambda a, b, out, add=False, bias=None: [out],
        )
        patches.enter_context(mock.patch.object(_C, "multiply", multiply))
        patches.enter_context(mock.patch.object(CpuBackend, "multiply", staticmethod(multiply)))
        watch(_C, "new_output", lambda *_: [], lambda *_: [])
        # The back end computes no sum of empty tensors, but the step may touch them.
        watch(CpuBackend, "sum", lambda _, partials, *__: partials, lambda _, __, ___, *targets: list(targets))
        copy = _noted(_C.copy, lambda target, source: [source], lambda target, source: [target])
        patches.enter_context(mock.patch.object(CpuBackend, "copy", staticmethod(copy)))
        yield
