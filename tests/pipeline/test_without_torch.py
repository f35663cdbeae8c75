"""Schedules can be generated, read and lowered without torch, on a laptop that plans a cluster or in a small tool."""

import subprocess
import sys
from pathlib import Path

import symm_overlap

PROGRAM = """
import sys, types
sys.modules["torch"] = None  # every import of torch fails
# The package's own __init__ registers ops with torch; the modules below it do not need it.
sys.modules["symm_overlap"] = package = types.ModuleType("symm_overlap")
package.__path__ = [sys.argv[1]]

import importlib, pathlib
modules = sorted(pathlib.Path(sys.argv[1], "pipeline").rglob("*.py"))
names = [".".join(path.relative_to(sys.argv[1]).with_suffix("").parts) for path in modules]
for name in names:
    if name not in ("pipeline._torch", "pipeline.interop", "pipeline.torch_runtime") and not name.startswith(
        ("pipeline.model", "pipeline.runtime")
    ):
        importlib.import_module("symm_overlap." + name.removesuffix(".__init__"))

from symm_overlap.pipeline import read_csv, write_csv
assert write_csv(read_csv("0F0,0B0")) == "0F0,0B0\\r\\n"
try:
    from symm_overlap.pipeline import to_torch
except ImportError:
    print("conversions need torch")
"""


def test_the_core_imports_without_torch():
    folder = Path(symm_overlap.__file__).parent
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "conversions need torch\n", done.stderr
