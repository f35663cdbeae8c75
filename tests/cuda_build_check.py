"""``python -m tests.cuda_build_check``: checks of a CUDA build that need no GPU."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import symm_overlap  # noqa: F401  registers the ops
from symm_overlap import _C

NAMESPACE = "symm_overlap::"
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"  # the same as in setup.py

# nvcc puts the code of each .cu file into a "fat binary": a header, then one entry for each architecture. An entry is
# either machine code for one family of GPUs, or PTX, which the driver compiles for newer GPUs.
FATBIN_MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of all entries
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, size of the code; the architecture at byte 28
PTX, MACHINE_CODE = 1, 2


def ops_without_cuda() -> tuple[list[str], list[str]]:
    """Return all ops of the namespace, and those of them that have no CUDA kernel."""
    ops = sorted({name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)})
    return ops, [op for op in ops if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")]


def wanted_images(architectures: str) -> set[str]:
    """Return the images that a list such as ``8.0;9.0+PTX`` requires: ``sm_80``, ``sm_90`` and ``compute_90``."""
    wanted = set()
    for name in re.split(r"[; ]+", architectures):
        number = name.removesuffix("+PTX").replace(".", "")
        wanted |= {f"sm_{number}", f"compute_{number}"} if name.endswith("+PTX") else {f"sm_{number}"}
    return wanted


def images_of_each_file(module: bytes) -> Iterator[set[str]]:
    """Yield the architectures of every fat binary in a compiled module, for machine code (sm) and for PTX (compute).

    Fat binaries without any entry, which nvcc creates when it links, are skipped.
    """
    at = module.find(FATBIN_MAGIC)
    while at >= 0:
        _, _, header, size = FATBIN_HEADER.unpack_from(module, at)
        entry, end = at + header, at + header + size
        images = set()
        while entry < end:
            kind, _, entry_header, code, architecture = ENTRY.unpack_from(module, entry)
            if kind in (PTX, MACHINE_CODE):
                images.add(f"{'compute' if kind == PTX else 'sm'}_{architecture}")
            entry += entry_header + code
        if images:
            yield images
        at = module.find(FATBIN_MAGIC, end)


def main() -> int:
    ops, missing = ops_without_cuda()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, module {_C.__file__}")
    print(f"{len(ops)} ops: {', '.join(op.removeprefix(NAMESPACE) for op in ops)}")
    if not _C.with_cuda:
        print("the extension was built without CUDA", file=sys.stderr)
        return 1
    if not ops or missing:
        print(f"ops without a CUDA kernel: {missing or 'there are no ops at all'}", file=sys.stderr)
        return 1
    print("every op has a CUDA kernel")
    wanted = wanted_images(os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES)
    files = list(images_of_each_file(Path(_C.__file__).read_bytes()))
    lacking = [sorted(wanted - images) for images in files if wanted - images]
    if not files or lacking:
        print(f"files of kernels that lack code for {lacking or 'anything: there are none'}", file=sys.stderr)
        return 1
    print(f"each of {len(files)} files of kernels has code for {', '.join(sorted(wanted))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
