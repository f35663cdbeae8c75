"""``symm-overlap info``: print what this machine and this installation support, and why the rest is unavailable."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from symm_overlap import _C
from symm_overlap._torch import SymmetricMemory, symm_mem
from symm_overlap.kernels import has_kernels
from symm_overlap.runtime import backend_of

Rows = list[tuple[str, str]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``info`` sub-command."""
    subparsers.add_parser(
        "info",
        help="print versions, devices, back ends and which paths are available",
        description="Prints versions, devices, peer access and multicast between GPUs, the back ends of symmetric "
        "memory, and which paths of the ops are available here. If a path is not available, the reason is printed.",
    )


def run(args: argparse.Namespace) -> int:
    """Print every section. A section never fails: it prints what it could not find."""
    sections: dict[str, Callable[[], Rows]] = {
        "versions": versions,
        "devices": devices,
        "GPU pairs": gpu_pairs,
        "symmetric memory": symmetric_memory,
        "matmul": matmul,
        "paths": paths,
    }
    for name, rows in sections.items():
        print(name)
        for key, value in rows():
            print(f"  {key:<14}  {value}")
    return 0


def versions() -> Rows:
    """Return the versions of Python, torch, the libraries that torch includes, this package and Triton."""
    cuda = torch.version.cuda
    return [
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("symm_overlap", f"{version_of('symm_overlap')}, compiled {'with' if _C.with_cuda else 'without'} CUDA"),
        ("CUDA", "this torch is built without it" if cuda is None else cuda),
        ("NCCL", "present" if torch.distributed.is_nccl_available() else "absent"),
        ("triton", version_of("triton")),
    ]


def version_of(package: str) -> str:
    """Return the installed version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def devices() -> Rows:
    """Return the number of cores that this process may run on, and every GPU."""
    rows = [("cpu", f"{len(os.sched_getaffinity(0))} cores, {backend_of('cpu').described(torch.device('cpu')).name}")]
    if torch.cuda.device_count() == 0:
        return [*rows, ("cuda", f"none: {no_gpu()}")]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        memory, target = f"{gpu.total_memory / 2**30:.0f} GiB", f"sm_{gpu.major}{gpu.minor}"
        rows.append((f"cuda:{i}", f"{gpu.name}, {memory}, {gpu.multi_processor_count} SMs, {target}"))
    return rows


def no_gpu() -> str:
    """Return the reason why there is no GPU to use."""
    return "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"


def gpu_pairs() -> Rows:
    """Return for each GPU which other GPUs' memory it can access, and whether it supports multicast."""
    gpus = range(torch.cuda.device_count())
    if not gpus:
        return [("none", no_gpu())]
    rows = []
    for i in gpus:
        reached = [str(j) for j in gpus if i != j and torch.cuda.can_device_access_peer(i, j)]
        unreached = [str(j) for j in gpus if i != j and str(j) not in reached]
        peers = f"peer access to {', '.join(reached) or 'no other GPU'}"
        if unreached:
            peers += f", not to {', '.join(unreached)}"
        multicast = SymmetricMemory.has_multicast_support(torch.autograd.DeviceType.CUDA, i)  # type: ignore[attr-defined]
        rows.append((f"cuda:{i}", f"{peers}; multicast {'yes' if multicast else 'no'}"))
    return rows


def symmetric_memory() -> Rows:
    """Return the back end of ``torch.distributed._symmetric_memory`` on each device, and the space for it on CPU."""
    shm = Path(_C.shm_dir())
    room = "absent"
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        room = f"{usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    cuda = symm_mem.get_backend(torch.device("cuda")) if torch.cuda.device_count() else None
    return [
        ("cpu", "symm_overlap: shared memory of the processes on this host"),
        (str(shm), room),
        ("cuda", cuda or f"none: {no_gpu()}"),
        ("NVSHMEM", "available" if symm_mem.is_nvshmem_available() else "absent from this torch"),
    ]


def matmul() -> Rows:
    """Return the library that the ops use for matmuls."""
    onednn = "oneDNN, because torch's MKL leaves AVX-512 unused on this CPU (torch.backends.mkldnn.enabled)"
    torch_mm = "torch.mm"
    return [
        ("cpu", f"float32: {torch_mm if backend_of('cpu').calls_torch(torch.float32) else onednn}"),
        ("others", torch_mm),
    ]


def paths() -> Rows:
    """Return for each path of the ops whether a call can use it here, and if not, why."""
    gpus = range(torch.cuda.device_count())
    apart = [(i, j) for i in gpus for j in gpus if i < j and not torch.cuda.can_device_access_peer(i, j)]
    no_cuda = no_gpu() if not gpus else None if _C.with_cuda else "symm_overlap was compiled without CUDA"
    shm = _C.shm_dir()
    no_memory = None if os.access(shm, os.W_OK | os.X_OK) else f"{shm} is not writable"
    return path_rows(torch.distributed.is_gloo_available(), no_memory, no_cuda, apart, *_no_kernels(gpus))


def _no_kernels(gpus: Sequence[int]) -> tuple[str | None, str | None]:
    """Return the reasons why no fused kernel runs on CPU and on these GPUs. A reason is None if kernels run there."""
    if importlib.util.find_spec("triton") is None:
        return ("Triton is not installed",) * 2
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    names = [f"sm_{major}{minor}" for major, minor in map(torch.cuda.get_device_capability, gpus)]
    unknown = sorted(name for name in names if not has_kernels(int(name.removeprefix("sm_"))))
    on_gpu = f"no kernel is known for {', '.join(unknown)}" if unknown else None
    if interpreted:
        return None, "TRITON_INTERPRET is set"
    return "kernels run only in Triton's interpreter there: set TRITON_INTERPRET=1", on_gpu


def path_rows(
    gloo: bool,
    no_memory: str | None,
    no_cuda: str | None,
    apart: Sequence[tuple[int, int]],
    no_interpreter: str | None,
    no_kernel: str | None,
) -> Rows:
    """Return the rows of :func:`paths`, computed from facts about this machine.

    Args:
        gloo: whether torch has gloo.
        no_memory: why processes cannot share memory on this host; None if they can.
        no_cuda: why nothing runs on CUDA; None if CUDA works.
        apart: pairs of GPUs without peer access.
        no_interpreter, no_kernel: why no fused kernel runs on CPU, and on the GPUs; None if kernels run there.
    """
    cpu = None if gloo else "this torch has no gloo"
    far = f"no peer access between GPUs {', '.join(f'{i} and {j}' for i, j in apart)}" if apart else None
    can = "processes of one host, pid namespace and user"
    return [
        ("single", _availability(None, no_cuda, "one rank")),
        ("sequential", _availability(cpu, no_cuda, "any ranks")),
        ("pipelined", _availability(cpu or no_memory, no_cuda or far, can)),
        ("fused", _availability(cpu or no_memory or no_interpreter, no_cuda or far or no_kernel, f"{can}, if forced")),
        ("c10d", _availability(cpu, no_cuda, "any ranks, also on several hosts")),
    ]


def _availability(no_cpu: str | None, no_cuda: str | None, between: str) -> str:
    here = [
        f"{device}: {'yes' if why is None else f'no, {why}'}" for device, why in (("cpu", no_cpu), ("cuda", no_cuda))
    ]
    return f"{'; '.join(here)} ({between})"
