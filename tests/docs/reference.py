"""The page docs/reference.md: every public name, its parameters, and the first sentence of its docstring.

`tests.docs.pages` writes the page, and a test compares it with what this module returns.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Generic

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs/reference.md"

MODULES = {
    "": "The ops, and what concerns all of them. README.md compares the ops with plain PyTorch.",
    ".nn": "Tensor-parallel layers and styles: [nn.md](nn.md).",
    ".inductor": "The compiler pass: [compile.md](compile.md).",
    ".fsdp": "FSDP2 and sharded linear layers: [fsdp.md](fsdp.md), [fsdp_prefetch.md](fsdp_prefetch.md).",
    ".pipeline": "Pipeline schedules and how they run: [pipeline.md](pipeline.md), [pipeline_run.md](pipeline_run.md).",
    ".profile": "What is exposed: [profile.md](profile.md).",
    ".plan": "Plans, their proof and their simulation: [plans.md](plans.md).",
}
"""The public modules, in the order of the page, with a sentence each."""

TOP = """# Reference

Every public name, in one line each. `help(symm_overlap.all_gather_matmul)` prints the rest: the equivalent in plain
PyTorch, shapes, dtypes, units, errors, and the source of the algorithm. Names that begin with a dot are methods and
properties of the class above them. `python -m tests.docs.pages` writes this page from the docstrings.
"""


def text() -> str:
    """Return the text of the page."""
    return "\n".join([TOP, *(_section(ending, about) for ending, about in MODULES.items())])


def _section(ending: str, about: str) -> str:
    module = import_module(f"symm_overlap{ending}")
    names = [name for name in module.__all__ if not name.startswith("__")]
    lines = [f"## {module.__name__}", "", about, "", "| name | what it is |", "|---|---|"]
    return "\n".join(lines + [row for name in names for row in _rows(module, name)]) + "\n"


def _rows(module: ModuleType, name: str) -> Iterator[str]:
    value = getattr(module, name)
    yield _row(_call(name, value), _docstring(module, name))
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for member, found in vars(value).items():
            inherited = any(hasattr(known, member) for known in (torch.nn.Module, tuple))
            docstring = None if member.startswith("_") or inherited else _own_docstring(found)
            if docstring:
                yield _row(_call(f".{member}", getattr(value, member)), docstring)


def _own_docstring(member: object) -> str | None:
    """Return the docstring of a method or property; None for all other attributes of a class."""
    methods = (classmethod, staticmethod, property, cached_property)
    return member.__doc__ if inspect.isfunction(member) or isinstance(member, methods) else None


def _row(call: str, docstring: str) -> str:
    return f"| `{call}` | {_first_sentence(docstring)} |"


def _call(name: str, value: object) -> str:
    """Return a call with the names of its parameters and their defaults, or only the name of what users do not call."""
    made_elsewhere = inspect.isclass(value) and issubclass(value, (BaseException, Enum, Generic))  # or a protocol
    if made_elsewhere or not (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismethod(value)):
        return name
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    call = name + str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return call if "<" not in call else f"{name}(...)"


def _docstring(module: ModuleType, name: str) -> str:
    """Return a docstring. A type alias has none of its own; it is the string after its assignment."""
    value = getattr(module, name)
    if not isinstance(value, GenericAlias):
        return inspect.getdoc(value) or ""
    for path in sorted(Path(module.__path__[0]).glob("*.py")):
        body = ast.parse(path.read_text()).body
        for statement, after in pairwise(body):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
                return inspect.cleandoc(ast.literal_eval(ast.unparse(after)))
    raise LookupError(f"{module.__name__}.{name}: no assignment found")


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().partition("\n\n")[0].split())
    sentence = re.match(r".*?[.:](?= [A-Z]|$)", paragraph)
    if sentence is None:
        raise ValueError(f"the docstring does not begin with a sentence: {paragraph!r}")
    text = re.sub(r":\w+:`", "`", sentence[0]).replace("``", "`").replace("|", "\\|")
    return text.rstrip(":") + ("." if text.endswith(":") else "")
