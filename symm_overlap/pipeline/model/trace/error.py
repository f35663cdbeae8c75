"""The error messages for a model that cannot be traced."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from types import FrameType

import torch
from torch import fx, nn


class TraceError(RuntimeError):
    """A model cannot be traced. The message says where, and what to do."""


_REMEDY = (
    "If this code depends on the values of tensors, or is such as torch.export cannot trace, move it out of the model, "
    "or cut the model without tracing: PipelineModel(model, trace=False, layer_names=..., first=..., last=...) calls "
    "the layers one after another as they are"
)
_OF_DTENSORS = (
    "A DTensor that a module returns can only be passed on to another module: let the module return a tensor "
    "(use_local_output=True), or compute with it inside of a module"
)

_NOT_OF_THE_CODE = (TypeError, ValueError, MemoryError, torch.OutOfMemoryError)
"""Errors of a batch that does not fit, or of too little memory."""

_CALLS = "pipeline/model/trace/calls.py"
_AROUND = ("torch/nn/modules/module.py", _CALLS)  # every call of a module passes through these


class PassedError(RuntimeError):  # torch prints every TypeError that is raised among fake tensors
    """Something other than tensors and constants would have to pass between layers. The message says what to do."""


def failure_message(error: BaseException, model: nn.Module, names: Mapping[int, str], dtensors: bool) -> str:
    """Return the message for an error that was raised while a model was traced.

    Args:
        names: the name of each module by its ``id``.
        dtensors: whether a module has returned a DTensor.
    """
    place = _place(error, names)
    where = f" in {place}" if place else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else "no message"
    if isinstance(error, PassedError):
        return f"{type(model).__name__} cannot be traced{where}\n  {reason}"
    remedy = "" if isinstance(error, _NOT_OF_THE_CODE) else f"\n{_REMEDY}"
    if dtensors and not any(frame.f_code.co_filename.endswith(_CALLS) for frame, _ in _frames(error)):
        remedy = f"\n{_OF_DTENSORS}{remedy}"  # the code is between modules
    return f"{type(model).__name__} cannot be traced{where}\n  {type(error).__name__}: {reason}{remedy}"


def line_of(node: fx.Node) -> str:
    """Return a colon and the line of the model that a node comes from, or nothing if that is unknown."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    return f": {lines[-2]}: {lines[-1]}" if len(lines) > 1 else ""


def _place(error: BaseException, names: Mapping[int, str]) -> str | None:
    """Return the innermost code of the model's own modules that an error, or its cause, passed through."""
    found = None
    for frame, line in _frames(error):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and id(module) in names and not code.co_filename.endswith(_AROUND):
            name = names[id(module)] or "the model itself"
            source = linecache.getline(code.co_filename, line).strip()
            found = f"{name} ({type(module).__name__}), {code.co_filename}, line {line}:\n    {source}"
    return found


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of an error's causes and then of the error, each with its current line."""
    cause = error.__cause__ or error.__context__
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
    if cause is not None:
        yield from _frames(cause)
