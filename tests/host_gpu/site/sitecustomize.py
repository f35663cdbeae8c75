"""Python runs this module when it starts, in every process of a run on the host GPU. It changes torch and Triton's
interpreter right after they are imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

CHANGED = {
    "torch": "host_gpu_aten",
    "triton.runtime.interpreter": "host_gpu_triton",
    "symm_overlap.kernels.device": "host_gpu_triton",
    "symm_overlap.kernels.rounding": "host_gpu_triton",
}
"""The modules that are changed, and for each the module that changes it."""


class Loader(importlib.abc.Loader):
    """Loads a module with another loader, and then changes it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(CHANGED[module.__name__]).change(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in `CHANGED`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CHANGED else None
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


if "SYMM_OVERLAP_HOST_GPU" in os.environ:
    sys.meta_path.insert(0, Finder())
