"""Compile the libraries of the host GPU if their sources have changed since the last time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "host-gpu"

RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"  # another name of the same library
KERNELS = "libhostgpukernels.so"
NVML = "libnvidia-ml.so.1"

SCOPE = "12symm_overlap4cuda"
"""The mangled namespace of the kernels, which distinguishes them from torch's kernels with the same names."""

_NUMBERS = [
    (f"I{mangled}Li{width}EE", f"<{dtypes}, {width}>")
    for dtypes, mangled, widest in (
        ("float, float", "ff", 4),
        ("double, double", "dd", 2),
        ("__nv_bfloat16, __nv_bfloat16", "13__nv_bfloat16S3_", 8),  # S3_ stands for the type before it
        ("__half, __half", "6__halfS3_", 8),
        ("__nv_bfloat16, float", "13__nv_bfloat16f", 8),
        ("__half, float", "6__halff", 8),
    )
    for width in (widest, 1)
]
INSTANCES = {
    name: [(f"{name}{mangled}", f"{name}{arguments}") for mangled, arguments in _NUMBERS]
    for name in ("reduce_kernel", "meet_and_sum_kernel")
}
"""The instances of each template kernel: a part of the mangled name, and the name in C++."""

_KERNEL = re.compile(r"(template <[^>]*>\s*)?__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")
_LAUNCH = re.compile(r"\w+<<<.*?>>>\(.*?\);", re.DOTALL)


def host_source(source: str) -> str:
    """Return the source of a file of kernels for g++: without its launches, and with registrations of its kernels.

    The launches are not needed, because the original host code, compiled by nvcc, makes them.
    """
    lines = [
        '#include "device.h"',
        _LAUNCH.sub("std::abort();", source),
        "namespace symm_overlap::cuda {",
        "namespace {",
    ]
    for template, name in _KERNEL.findall(source):
        for mangled, instance in INSTANCES[name] if template else [(f"{len(name)}{name}", name)]:
            form = f"&host_gpu::HostForm<&{instance}>::launch"
            lines.append(f'const host_gpu::Registration register_{mangled}("{SCOPE}", "{mangled}", {form});')
    return "\n".join([*lines, "}", "}", ""])


def toolkit() -> Path:
    """Return the include folder of the CUDA toolkit."""
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


def sources() -> Iterator[Path]:
    """Yield the source files of the libraries."""
    for folder in (HERE / "runtime", HERE / "kernels", ROOT / "csrc" / "cuda", ROOT / "csrc" / "common"):
        yield from sorted(path for path in folder.rglob("*") if path.is_file())
    yield Path(__file__)


def compile_library(name: str, files: list[Path], *options: str) -> None:
    """Compile a shared library. It is moved into place when complete, as another process may use the old one."""
    made = FOLDER / f"{name}.{os.getpid()}"
    command = ["g++", "-std=c++20", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wno-unused-function", *options]
    subprocess.run([*command, f"-I{toolkit()}", *map(str, files), "-o", str(made)], check=True)
    made.replace(FOLDER / name)


def build() -> Path:
    """Bring the libraries up to date, and return their folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    stamp = FOLDER / "sources"
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()
    if stamp.exists() and stamp.read_text() == found:
        return FOLDER
    runtime = HERE / "runtime"
    files = [path for path in sorted(runtime.glob("*.cpp")) if path.name != "nvml.cpp"]
    exported = f"-Wl,-soname,{RUNTIME},--version-script={runtime / 'version.map'}"
    compile_library(RUNTIME, files, "-fvisibility=hidden", exported, "-ldl", "-lpthread")
    (FOLDER / DRIVER).unlink(missing_ok=True)
    (FOLDER / DRIVER).symlink_to(RUNTIME)
    compile_library(NVML, [runtime / "nvml.cpp"])
    kernels = sorted((HERE / "kernels").glob("*.cpp"))
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        kernels.append(FOLDER / f"{source.stem}.cpp")
        kernels[-1].write_text(host_source(source.read_text()))
    # The folder of the host's kernels comes first, because its system_memory.cuh replaces the one in csrc.
    folders = [f"-I{folder}" for folder in (HERE / "kernels", HERE, ROOT / "csrc")]
    compile_library(KERNELS, kernels, "-Wno-unused-variable", "-Wno-unknown-pragmas", *folders, str(FOLDER / RUNTIME))
    stamp.write_text(found)
    return FOLDER
