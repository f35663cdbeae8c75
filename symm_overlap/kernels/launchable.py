"""What Triton gives to the CUDA driver when it launches a kernel, so that C++ can launch the kernel again.

In every launch by Triton, Python finds out again what it has found out in the launch before: the types of all
arguments, the compiled kernel, and the layout of its parameters.

This uses private APIs of Triton. It was tested with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0. With every version, the sizes
of the parameters are compared with those that the compiled code declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

Parameter = tuple[Any, ...]
"""One parameter of a compiled kernel: ("address", tensor), ("number", value), or ("matrix", tensor, element type,
swizzle, sizes, stride, box), which is a tensor map of the tensor; see csrc/issue/kernel.h.
"""

_SMALL_BYTES = 128 << 10
"""Newer versions of Triton change the tensor maps of smaller matrices, for drivers up to CUDA 13.1. So these matrices
are left to Triton.
"""

_ENTRY = re.compile(r"\.entry\s+\w+\((.*?)\)", re.DOTALL)
_POINTER = r"(?:\.ptr\s+(?:\.[a-z]+\s+)*(?:\.align\s+\d+\s+)?)?"
_DECLARED = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+" + _POINTER + r"[A-Za-z_$]\w*(?:\[(\d+)\])?")


class Launchable(NamedTuple):
    """A kernel that is compiled and loaded, and all that the CUDA driver needs to launch it.

    Attributes:
        function: the driver's handle.
        threads, shared_bytes: of each program.
        loaded: keeps the kernel loaded.
    """

    function: int
    threads: int
    shared_bytes: int
    parameters: list[Parameter]
    loaded: object


def launchable(kernel: Any, *arguments: Any, **options: Any) -> Launchable | None:
    """Return what a launch with these arguments and options would give to the CUDA driver. The kernel is loaded.

    Return None if only Triton should launch the kernel: if it is interpreted, if the launch has hooks, or if the
    parameters that the compiled code declares are not those that this function would expect.
    """
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    if compiled is None or _has_hooks():
        return None
    compiled._init_handles()
    found, metadata = compiled.metadata, compiled.metadata._asdict()
    special = "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"
    if found.num_ctas != 1 or any(metadata.get(name) for name in special):
        return None
    values, maps = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}, iter(found.tensordesc_meta)
    try:
        sized = [each for name, kind in compiled.src.signature.items() for each in _flat(kind, values.get(name), maps)]
    except _OtherwiseError:
        return None
    sized += [(8, ("number", 0))] * 2  # two addresses of memory that this kernel does not need
    if [size for size, _ in sized] != declared_bytes(compiled.asm["ptx"]):
        return None
    parameters = [parameter for _, parameter in sized]
    return Launchable(compiled.function, 32 * found.num_warps, found.shared, parameters, compiled)


class _OtherwiseError(Exception):
    """A parameter of a kind that this module does not know."""


def _has_hooks() -> bool:
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def _flat(kind: Any, value: Any, maps: Iterator[Any]) -> list[tuple[int, Parameter]]:
    """Return the parameters of one argument, each with its size in bytes. ``kind``: its type as Triton writes it."""
    if isinstance(kind, tuple):
        return [each for pair in zip(kind, value, strict=True) for each in _flat(*pair, maps)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [(8, ("address", value))]
    if kind in ("i32", "i64"):
        return [(int(kind[1:]) // 8, ("number", int(value)))]
    if not kind.startswith("tensordesc<") or len(value.shape) != 2 or value.padding != "zero":
        raise _OtherwiseError
    described = next(maps)
    size, (rows, columns), stride = described["elem_size"], value.shape, value.strides[0]
    if described["fp4_padded"] or ((rows - 1) * stride + columns) * size < _SMALL_BYTES:
        raise _OtherwiseError
    of_host = TMA_DTYPE_DEVICE_TO_HOST[described["elem_type"]]
    box = tuple(reversed(described["block_size"]))
    matrix = "matrix", value.base, of_host, described["swizzle"], (columns, rows), stride * size, box
    numbers = [(4, rows), (4, columns), (8, stride), (8, value.strides[1])]
    return [(128, matrix), *((size, ("number", number)) for size, number in numbers)]


def declared_bytes(ptx: str) -> list[int]:
    """Return the sizes of the parameters that a compiled kernel declares."""
    entry = _ENTRY.search(ptx)
    assert entry is not None
    return [int(bits) // 8 * int(count or 1) for bits, count in _DECLARED.findall(entry[1])]
