"""Find processes and shared memory that a test session has left behind.

Each worker of pytest-xdist is a session of its own, which ignores the processes of other workers. Shared memory that no
process uses any more cannot be attributed to a worker, so all workers report it.
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

# This variable is set in every process that the session starts, so /proc shows it even after the parents have ended.
MARKER = "SYMM_OVERLAP_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")


def mark_session() -> None:
    os.environ[MARKER] = uuid.uuid4().hex


def processes() -> dict[int, str]:
    """Return the command lines, by pid, of this session's other live processes except multiprocessing's two servers."""
    marker = f"{MARKER}={os.environ[MARKER]}".encode()
    servers = (multiprocessing.forkserver._forkserver, multiprocessing.resource_tracker._resource_tracker)
    expected = {os.getpid(), *(getattr(s, "_forkserver_pid", None) or getattr(s, "_pid", None) for s in servers)}
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if int(process.name) not in expected and marker in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def shared_memory() -> set[str]:
    """Return the names in /dev/shm that no process of this machine has mapped or open.

    Semaphores of Python's multiprocessing are left out, because any other program may create one while the tests run.
    """
    names = {file.name for file in SHARED_MEMORY.iterdir() if not file.name.startswith("sem.mp-")}
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            maps = (process / "maps").read_text().splitlines()
            held |= {line.rpartition("/")[2] for line in maps if f"{SHARED_MEMORY}/" in line}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # the descriptor has been closed
                    held.add(Path(os.readlink(descriptor)).name)
    return names - held


def wait_until_empty(find: Callable[[], object], seconds: float) -> object:
    """Call `find` until it finds nothing, for at most `seconds`. Return what it found last.

    Processes that were just killed need a moment to end.
    """
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
