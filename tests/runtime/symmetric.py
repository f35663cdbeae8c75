"""Helpers of the tests of symmetric memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import symm_overlap  # noqa: F401, this import makes torch's symmetric memory work on CPU
from symm_overlap._torch import SymmetricMemory, symm_mem
from tests.ranks import Rank


def make(
    group: dist.ProcessGroup, *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, SymmetricMemory]:
    """Return a symmetric tensor of zeros and its handle. Every rank of the group must call this."""
    tensor = symm_mem.empty(*shape, dtype=dtype, device="cpu")
    return tensor, symm_mem.rendezvous(tensor, group)


def error_of(function: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """Return the type and message of the exception that the function raises, and the seconds until it ended."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def in_thread(function: Callable[..., object], *args: Any) -> threading.Thread:
    """Start and return a thread that runs the function. It is a daemon: if it hangs, the process can still end."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def shared_files(folder: str = "/dev/shm") -> list[os.stat_result]:
    """Return the status of each file in the shared-memory folder that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(folder + "/"):
                found.append(os.stat(int(descriptor)))
    return found


def shared_mappings(folder: str = "/dev/shm") -> list[str]:
    """Return the lines of /proc/self/maps for files in the shared-memory folder."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if f" {folder}/" in line]


def pauses(seed: int) -> Iterator[None]:
    """Return an iterator. Each of its steps sleeps for a short time or, with a probability of 3/4, not at all."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        pause = int(torch.randint(0, 4, (1,), generator=generator))
        if pause == 3:
            time.sleep(1e-4)
        yield


def allocate(me: Rank, nbytes: int) -> tuple[str, str]:
    """Return the type and message of the error of an allocation. After an error, a smaller tensor must still fit."""
    found = error_of(symm_mem.empty, nbytes, dtype=torch.uint8, device="cpu")[:2]
    if found[0] != "" and nbytes > 1 << 20:
        symm_mem.empty(1 << 20, dtype=torch.uint8, device="cpu").fill_(1)
    return found
