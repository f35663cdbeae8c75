"""Run any Python program on the host GPU: ``python -m tests.host_gpu.run [-m module | file] [its arguments]``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch

from tests.host_gpu.build import HERE, KERNELS, RUNTIME, build


def environment() -> dict[str, str]:
    """Build the host GPU, and return the environment with which a Python process uses it."""
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
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # all ranks share one GPU
    }


def become(arguments: list[str]) -> NoReturn:
    """Replace this process by Python on the host GPU, with these arguments."""
    if torch.version.cuda is None:
        sys.exit("this torch is compiled without CUDA: use the source tree and the Python of `make cuda-build`")
    os.execve(sys.executable, [sys.executable, *arguments], environment())


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    become(sys.argv[1:])
