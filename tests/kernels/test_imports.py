"""Triton is imported when a kernel is loaded, and not before: the import takes long, and Triton may be missing."""

from __future__ import annotations

import ast
import sys

import pytest

from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import INTERPRETER
from tests.test_layers import FILES, PACKAGE, at_import, imported, tree_of


def imports_triton(name: str) -> bool:
    for node in ast.walk(tree_of(name)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(each.split(".")[0] == "triton" for each in names):
            return True
    return False


def test_nothing_that_the_package_imports_imports_triton() -> None:
    """No module that is imported with the package imports Triton. Only kernels, loaded later, do."""
    with_triton = {name.removesuffix(".py") for name in FILES if imports_triton(name)}
    assert {"kernels/device", "kernels/launch", "kernels/all_gather_matmul"} <= with_triton
    assert all(name.startswith("kernels/") for name in with_triton)
    importers = [name for name in FILES if name.startswith(("kernels/", "collective/exchange/fused/"))]
    graph = {name.removesuffix(".py"): imported(name, at_import(tree_of(name))) for name in importers}
    reached, new = set(), {"collective/exchange/fused/__init__", "kernels/configuration"}
    while new:
        reached |= new
        new = {below for name in new for below in graph.get(name, ())} - reached
    assert "kernels/__init__" in reached
    assert not reached & with_triton
    # All other modules of the package that use kernels import only their configuration.
    others = [name for name in FILES if name not in importers and "kernels" in (PACKAGE / name).read_text()]
    known = {each for name in others for each in imported(name, ast.walk(tree_of(name))) if "kernels/" in each}
    assert known <= {"kernels/__init__", "kernels/configuration"}


def test_without_triton_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_matmul", "device"):
        monkeypatch.delitem(sys.modules, f"symm_overlap.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="the path 'fused' needs Triton: pip install triton"):
        load("all_gather_matmul", INTERPRETER)
