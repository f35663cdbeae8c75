"""``symm-overlap info``: what this machine and this installation can do, and why not the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

Rows = list[tuple[str, str]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``info`` sub-command."""
    subparsers.add_parser(
        "info",
        help="print versions, devices, back ends and which paths are available",
        description="Prints versions, devices, peer access and multicast between GPUs, the back ends of symmetric "
        "memory, and which paths of the ops are available here, with the reason where one is not.",
    )


def run(args: argparse.Namespace) -> int:
    """Prints every section; a section never fails, it says what it could not find."""
    sections: dict[str, Callable[[], Rows]] = {
        "versions": versions,
        "devices": devices,
        "GPU pairs": gpu_pairs,
        "symmetric memory": symmetric_memory,
        "paths": paths,
    }
    for name, rows in sections.items():
        print(name)
        for key, value in rows():
            print(f"  {key:<14}  {value}")
    return 0


def versions() -> Rows:
    """Python, torch and what comes with it, this package, triton."""
    import torch

    import symm_overlap._C as extension

    cuda = torch.version.cuda
    return [
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("symm_overlap", f"{version_of('symm_overlap')}, compiled {'with' if extension.with_cuda else 'without'} CUDA"),
        ("CUDA", "this torch is built without it" if cuda is None else cuda),
        ("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent"),
        ("triton", version_of("triton")),
    ]


def version_of(package: str) -> str:
    """The installed version of a distribution, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def devices() -> Rows:
    """The cores this process may run on, and every GPU."""
    import torch

    rows = [("cpu", f"{len(os.sched_getaffinity(0))} cores, {_cpu_model()}")]
    if torch.cuda.device_count() == 0:
        return [*rows, ("cuda", no_gpu())]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        rows.append(
            (
                f"cuda:{i}",
                f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs, sm_{gpu.major}{gpu.minor}",
            )
        )
    return rows


def no_gpu() -> str:
    """Why there is no GPU to use."""
    import torch

    return "none: this torch is built without CUDA" if torch.version.cuda is None else "none: torch sees no GPU"


def gpu_pairs() -> Rows:
    """Whether each two GPUs reach each other's memory, and each GPU's multicast."""
    import torch
    from torch.autograd import DeviceType

    from symm_overlap._torch import SymmetricMemory

    gpus = range(torch.cuda.device_count())
    if not gpus:
        return [("none", no_gpu().removeprefix("none: "))]
    rows = []
    for i in gpus:
        reached = [str(j) for j in gpus if i != j and torch.cuda.can_device_access_peer(i, j)]
        unreached = [str(j) for j in gpus if i != j and str(j) not in reached]
        peers = f"peer access to {', '.join(reached) or 'no other GPU'}"
        if unreached:
            peers += f", not to {', '.join(unreached)}"
        multicast = SymmetricMemory.has_multicast_support(DeviceType.CUDA, i)
        rows.append((f"cuda:{i}", f"{peers}; multicast {'yes' if multicast else 'no'}"))
    return rows


def symmetric_memory() -> Rows:
    """The back end behind ``torch.distributed._symmetric_memory`` on each device, and the room for it on CPU."""
    import torch

    from symm_overlap._torch import symm_mem

    shm = Path("/dev/shm")
    room = "absent"
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        room = f"{usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    cuda = symm_mem.get_backend("cuda") if torch.cuda.device_count() else None
    return [
        ("cpu", "symm_overlap: shared memory of the processes on this host"),
        (str(shm), room),
        ("cuda", cuda or no_gpu()),
        ("NVSHMEM", "available" if symm_mem.is_nvshmem_available() else "absent from this torch"),
    ]


def paths() -> Rows:
    """Each path of the ops and whether a call could take it here."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    return [
        ("single", "available: one rank needs no communication"),
        ("sequential", _with("available", dist.is_gloo_available(), "this torch has no gloo")),
        ("pipelined", f"available on cpu; on cuda {'needs peer access, see above' if gpus else no_gpu()}"),
        ("c10d", "available"),
        ("fused", "not available: its kernels are not part of this version"),
    ]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
