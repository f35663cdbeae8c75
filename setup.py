"""Builds the extension modules ``symm_overlap._C`` and ``symm_overlap._sim``. Metadata is in pyproject.toml.

``_sim`` has the simulators of csrc/sim. It is a separate module because it does not need torch at run time. To compile
it, only the headers of pybind11 are needed, which torch includes.

Environment:

``SYMM_OVERLAP_CUDA``     0: do not compile csrc/cuda; 1: compile it or fail. Default: compile it if torch was built
                          for CUDA and a CUDA toolkit is found.
``CUDA_HOME``             the toolkit, if it is not the one of the ``nvcc`` on the PATH or in /usr/local/cuda.
``TORCH_CUDA_ARCH_LIST``  GPU architectures, default ``8.0;9.0;10.0+PTX`` (A100, H100/H200, B200, and through PTX
                          all later GPUs).
``MAX_JOBS``              number of parallel compilers, default 2. A file that includes torch's headers needs about
                          2 GB.
"""

from __future__ import annotations

import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    import torch
except ImportError:
    sys.exit(
        "symm_overlap compiles against the torch it will run with, but this Python has no torch. Install torch first "
        "(2.11 to 2.15), then run `pip install --no-build-isolation .`; or let `make test` do both."
    )

ROOT = Path(__file__).resolve().parent
CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"


def find_cuda_toolkit() -> Path | None:
    """Return the folder of the CUDA toolkit, or None.

    torch uses the parent of whatever ``nvcc`` is on the PATH, which is wrong if this ``nvcc`` is a wrapper script. So a
    candidate counts only if it also has the headers of the CUDA runtime.
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
    """Return the toolkit to compile csrc/cuda with, or None for an extension without CUDA."""
    choice = os.environ.get("SYMM_OVERLAP_CUDA", "")
    if choice not in ("", "0", "1"):
        sys.exit(
            f"SYMM_OVERLAP_CUDA={choice!r}: allowed are 0 (without CUDA), 1 (with CUDA) and unset (with CUDA if found)."
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
            f"nvcc on the PATH, or in /usr/local/cuda. Install CUDA {torch.version.cuda} and set CUDA_HOME, or unset "
            "SYMM_OVERLAP_CUDA."
        )
    return toolkit if torch.version.cuda else None


toolkit = cuda_toolkit_to_use()
if toolkit is not None:
    # cpp_extension reads this when it is imported and when it creates nvcc's arguments, so set it before both.
    os.environ["CUDA_HOME"] = str(toolkit)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
os.environ.setdefault("MAX_JOBS", "2")

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


class BuildPerTorch(BuildExtension):
    """Keeps the object files of each torch version, with and without CUDA, in a separate folder.

    So ninja recompiles only what has changed, even in an editable install, for which setuptools would use a fresh
    temporary folder. And two environments that build from one checkout never link each other's objects.
    """

    def finalize_options(self) -> None:
        environment = f"{sys.implementation.cache_tag}-torch-{torch.__version__}{'-cuda' if toolkit else ''}"
        self.build_temp = str(ROOT / "build" / environment)
        super().finalize_options()


class BuildPythonAnew(build_py):
    """Deletes the results of earlier builds: a module that was deleted from the tree must not be in a new wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "symm_overlap", ignore_errors=True)
        super().run()


def together(folder: str, *others: str) -> str:
    """Write a file that includes the C++ files of a folder of csrc and ``others``. Return its path from `ROOT`.

    A compiler takes 10 to 20 seconds to read torch's headers, and a few seconds for all the code of a folder. So they
    are compiled as one file.
    """
    included = [*sorted(glob(f"{folder}/*.cpp", root_dir=ROOT / "csrc")), *others]
    text = "".join(f'#include "{each}"\n' for each in included)
    path = Path("build", "together", f"{folder}.cpp")
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    if not (ROOT / path).is_file() or (ROOT / path).read_text() != text:  # a new file would be compiled anew
        (ROOT / path).write_text(text)
    return str(path)


def torchs_extension() -> Extension:
    sources = [together("issue", "module.cpp"), together("cpu")]
    # -g0: debug information of torch's headers would double the compile time and make the module 30 times as large.
    compiler_flags = {"cxx": ["-O3", "-g0", "-Wall"]}
    macros: list[tuple[str, str | None]] = []
    if toolkit is not None:
        sources += [together("cuda"), *sorted(glob("csrc/cuda/*.cu", root_dir=ROOT))]
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
    torchs = CppExtension(name="symm_overlap._sim", sources=[together("sim")])
    return Extension(
        name=torchs.name,
        sources=torchs.sources,
        include_dirs=[str(ROOT / "csrc"), *torchs.include_dirs],
        language="c++",
        # Without contraction: a fused multiply-add would give other bits than the same code in Python.
        extra_compile_args={"cxx": ["-O3", "-g0", "-Wall", "-fvisibility=hidden", "-ffp-contract=off"]},
    )


setup(
    ext_modules=[torchs_extension(), simulators()],
    cmdclass={"build_ext": BuildPerTorch, "build_py": BuildPythonAnew},
)
