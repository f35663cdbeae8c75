"""What the tests of symmetric memory share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import symm_overlap  # noqa: F401, which makes torch's symmetric memory work on CPU
from symm_overlap._torch import SymmetricMemory, symm_mem


def make(
    group: dist.ProcessGroup, *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, SymmetricMemory]:
    """A symmetric tensor of zeros and its handle. Collective."""
    tensor = symm_mem.empty(*shape, dtype=dtype, device="cpu")
    return tensor, symm_mem.rendezvous(tensor, group)


def error_of(function: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """Type and message of what the function raises, and the seconds until it did."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def in_thread(function: Callable[..., object], *args: Any) -> threading.Thread:
    """A thread that runs the function. The process does not wait for it, should it hang."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def shared_files(folder: str = "/dev/shm") -> list[os.stat_result]:
    """The objects in the shared-memory folder that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(folder + "/"):
                found.append(os.stat(int(descriptor)))
    return found


def shared_mappings(folder: str = "/dev/shm") -> list[str]:
    """Lines of /proc/self/maps of objects in the shared-memory folder."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if f" {folder}/" in line]


def pauses(seed: int) -> Iterator[None]:
    """Each step pauses for a short random time, or not at all."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        pause = int(torch.randint(0, 4, (1,), generator=generator))
        if pause == 3:
            time.sleep(1e-4)
        yield
