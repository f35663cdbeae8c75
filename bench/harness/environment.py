"""A description of everything that figures depend on: processor, cores, threads, versions, commit and clocks."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch


def environment(device: str, world: int, threads: int) -> dict[str, object]:
    """Return a JSON-ready description of this machine and of the software. It is printed above every table."""
    found: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "ranks": world,
        "threads_per_rank": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "symm_overlap": package_version(),
        "commit": commit(),
        "device": device,
    }
    if device == "cuda":
        found["cuda"] = torch.version.cuda
        found["gpus"] = gpus()
    return found


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def package_version() -> str:
    import symm_overlap

    return str(getattr(symm_overlap, "__version__", "unknown"))


def commit() -> str:
    """Return the checkout's commit, followed by ``+changes`` if tracked files differ from it."""
    here = Path(__file__).resolve().parent
    name = _output("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    if not name:
        return "unknown"
    return name + (
        "+changes" if _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no") else ""
    )


def gpus() -> list[str]:
    """Return a line for each GPU: name, current and maximum SM and memory clocks, and driver.

    They come from nvidia-smi, because torch does not know the clocks.
    """
    query = "name,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,driver_version"
    lines = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    return lines.splitlines() or [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
