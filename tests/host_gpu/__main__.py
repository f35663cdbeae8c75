"""Runs the GPU tests on the host GPU: ``python -m tests.host_gpu [arguments of pytest]``."""

from __future__ import annotations

import os
import sys

import torch

from tests.host_gpu.build import HERE, KERNELS, RUNTIME, build

PROCESSES = 3
"""Of pytest. Most tests wait for most of their time; each process has rank processes of its own."""


def environment() -> dict[str, str]:
    """The variables with which a Python process finds the host GPU."""
    folder = build()
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ,
        "SYMM_OVERLAP_HOST_GPU": str(folder / RUNTIME),
        "SYMM_OVERLAP_HOST_GPU_KERNELS": str(folder / KERNELS),
        "LD_PRELOAD": str(folder / RUNTIME),
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), *before]),
        "TRITON_INTERPRET": "1",
    }


def main(arguments: list[str]) -> None:
    """Becomes pytest."""
    if torch.version.cuda is None:
        sys.exit("the host GPU runs what is compiled for CUDA: use the tree and the Python of `make cuda-build`")
    given = arguments or ["-n", str(PROCESSES), "--dist", "worksteal"]
    names = [] if any("tests/gpu" in argument for argument in arguments) else ["tests/gpu"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.host_gpu.selection",
        "-m",
        "gpu",
        "--capture=sys",
        *given,
        *names,
    ]
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main(sys.argv[1:])
