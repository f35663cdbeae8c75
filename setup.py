"""Builds the extension modules ``symm_overlap._C`` and ``symm_overlap._sim``. Metadata is in pyproject.toml.

``_sim`` has the simulators of csrc/sim. It is apart because it needs no torch when it runs; only the headers of
pybind11 that torch ships are taken from torch.

Environment:

``SYMM_OVERLAP_CUDA``     0: never compile csrc/cuda; 1: compile it or fail. Default: compile it when torch was built
                          for CUDA and a CUDA toolkit is found.
``CUDA_HOME``             the toolkit, when it is not the one around ``nvcc`` on the PATH or in /usr/local/cuda.
``TORCH_CUDA_ARCH_LIST``  GPU architectures, default ``8.0;9.0;10.0+PTX`` (A100, H100/H200, B200, and
                          by its PTX whatever comes later).
``MAX_JOBS``              compilers at once, default 2: a file that includes torch's headers takes about 2 GB.
"""

from __future__ import annotations

import os
import shutil
import sys
from glob import glob
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    import torch
except ImportError:
    sys.exit(
        "symm_overlap compiles against the torch it will run with, and this Python has no torch. Install it first "
        "(2.11 to 2.15), then `pip install --no-build-isolation .`; or let `make test` do both."
    )

ROOT = Path(__file__).resolve().parent
CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"


def find_cuda_toolkit() -> Path | None:
    """The CUDA toolkit's folder, or None.

    torch takes the parent of whatever ``nvcc`` the PATH has, which is wrong where that is a wrapper script; so a
    candidate counts only if the runtime's headers are there too.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        candidates = [Path(named)]
    else:
        nvcc = shutil.which("nvcc")
        candidates = [Path(nvcc).resolve().parent.parent] if nvcc else []
        candidates.append(Path("/usr/local/cuda"))
    for toolkit in candidates:
        headers = [toolkit / "include", *toolkit.glob("targets/*/include")]
        if (toolkit / "bin" / "nvcc").is_file() and any((h / "cuda_runtime.h").is_file() for h in headers):
            return toolkit
    return None


def cuda_toolkit_to_use() -> Path | None:
    """The toolkit to compile csrc/cuda with, or None for an extension without CUDA."""
    choice = os.environ.get("SYMM_OVERLAP_CUDA", "")
    if choice not in ("", "0", "1"):
        sys.exit(
            f"SYMM_OVERLAP_CUDA={choice!r}: allowed are 0 (without CUDA), 1 (with CUDA) and unset (what is found)."
        )
    if choice == "0":
        return None
    toolkit = find_cuda_toolkit()
    if choice == "1" and torch.version.cuda is None:
        sys.exit(
            f"SYMM_OVERLAP_CUDA=1, but torch {torch.__version__} was built without CUDA. Install a CUDA build of "
            "torch, or unset SYMM_OVERLAP_CUDA."
        )
    if choice == "1" and toolkit is None:
        sys.exit(
            "SYMM_OVERLAP_CUDA=1, but there is no CUDA toolkit (bin/nvcc and cuda_runtime.h) at CUDA_HOME, around the "
            f"PATH's nvcc or in /usr/local/cuda. Install CUDA {torch.version.cuda} and set CUDA_HOME, or unset "
            "SYMM_OVERLAP_CUDA."
        )
    return toolkit if torch.version.cuda else None


toolkit = cuda_toolkit_to_use()
if toolkit is not None:
    # Read by cpp_extension when it is imported and when it makes nvcc's arguments, so it must be set before both.
    os.environ["CUDA_HOME"] = str(toolkit)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
os.environ.setdefault("MAX_JOBS", "2")

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


class BuildPerTorch(BuildExtension):
    """Keeps the object files of each torch, with and without CUDA, in a folder of their own.

    Then ninja recompiles only what changed, in an editable install too (setuptools would use a fresh temporary
    folder), and two environments that build from one checkout never link each other's objects.
    """

    def finalize_options(self) -> None:
        environment = f"{sys.implementation.cache_tag}-torch-{torch.__version__}{'-cuda' if toolkit else ''}"
        self.build_temp = str(ROOT / "build" / environment)
        super().finalize_options()


class BuildPythonAnew(build_py):
    """Forgets earlier builds: a module that was deleted from the tree must not come back in a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "symm_overlap", ignore_errors=True)
        super().run()


def torchs_extension() -> Extension:
    folders = [glob(f"csrc/{folder}/*.cpp", root_dir=ROOT) for folder in ("cpu", "issue")]
    sources = ["csrc/module.cpp", *sorted(chain.from_iterable(folders))]
    # -g0: debug information of the torch headers doubles the compile time and makes the module 30 times as large.
    compiler_flags = {"cxx": ["-O3", "-g0", "-Wall"]}
    macros: list[tuple[str, str | None]] = []
    if toolkit is not None:
        sources += sorted(glob("csrc/cuda/*.cpp", root_dir=ROOT) + glob("csrc/cuda/*.cu", root_dir=ROOT))
        compiler_flags["nvcc"] = ["-O3", "-lineinfo"]
        macros.append(("SYMM_OVERLAP_WITH_CUDA", None))
    return (CUDAExtension if toolkit else CppExtension)(
        name="symm_overlap._C",
        sources=sources,
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros,
        extra_compile_args=compiler_flags,
    )


def simulators() -> Extension:
    torchs = CppExtension(name="symm_overlap._sim", sources=sorted(glob("csrc/sim/*.cpp", root_dir=ROOT)))
    return Extension(
        name=torchs.name,
        sources=torchs.sources,
        include_dirs=[str(ROOT / "csrc"), *torchs.include_dirs],
        language="c++",
        # Without contraction: a fused multiply-add would give other bits than the twins in Python.
        extra_compile_args={"cxx": ["-O3", "-g0", "-Wall", "-fvisibility=hidden", "-ffp-contract=off"]},
    )


setup(
    ext_modules=[torchs_extension(), simulators()],
    cmdclass={"build_ext": BuildPerTorch, "build_py": BuildPythonAnew},
)
