"""``python -m tests.cuda_build_check``: what can be checked of a CUDA build with no GPU."""

from __future__ import annotations

import sys

import torch

import symm_overlap  # noqa: F401  registers the ops
from symm_overlap import _C

NAMESPACE = "symm_overlap::"


def ops_without_cuda() -> tuple[list[str], list[str]]:
    """All ops of the namespace, and those of them that CUDA tensors cannot be given to."""
    ops = sorted({name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)})
    return ops, [op for op in ops if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")]


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
