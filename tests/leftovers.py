"""Finds what a test session must not leave behind: processes, and shared memory that nobody holds any more.

Each worker of pytest-xdist is a session. It sees no process of another worker. Shared memory that nobody holds any more
does not say whose it was, so the workers all report it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

# In the environment of every process that this session starts, and so readable in /proc after its parents are gone.
MARKER = "SYMM_OVERLAP_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")


def mark_session() -> None:
    os.environ[MARKER] = uuid.uuid4().hex


def processes() -> dict[int, str]:
    """Command line by pid of every other live process of this session, apart from multiprocessing's two servers."""
    marker = f"{MARKER}={os.environ[MARKER]}".encode()
    servers = (multiprocessing.forkserver._forkserver, multiprocessing.resource_tracker._resource_tracker)
    expected = {os.getpid(), *(getattr(s, "_forkserver_pid", None) or getattr(s, "_pid", None) for s in servers)}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if int(process.name) not in expected and marker in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm that no process of this machine has mapped or open: memory lost until someone looks.

    Semaphores of Python's multiprocessing are left out: any other program may make one while the tests run.
    """
    names = {file.name for file in SHARED_MEMORY.iterdir() if not file.name.startswith("sem.mp-")}
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            maps = (process / "maps").read_text().splitlines()
            held |= {line.rpartition("/")[2] for line in maps if f"{SHARED_MEMORY}/" in line}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    held.add(Path(os.readlink(descriptor)).name)
    return names - held


def wait_until_empty(find: Callable[[], object], seconds: float) -> object:
    """What `find` still finds after at most `seconds`: processes that were just killed need a moment to go."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
