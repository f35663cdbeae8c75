"""Find the processes of a command that was started in its own session."""

from __future__ import annotations

import contextlib
from pathlib import Path


def processes_of(session: int) -> dict[int, str]:
    """Return the command line of every live process of a session, by pid."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            # The fields after the name, which is in brackets: state, parent, process group, session.
            state, _, _, its_session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found
