"""Ctrl-C at a terminal, at any moment of the start: one line, exit code 130, and no process left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.session import processes_of
from tests.leftovers import wait_until_empty

ROOT = Path(__file__).parents[2]
# A session of its own with a terminal, so that the terminal sends the interrupt to every process of the command.
PROGRAM = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background of a shell ignore it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import symm_overlap.cli.__main__ as command
run = command._run
def run_and_say_so(arguments):  # before, an interrupt would be this program's own
    print("loaded", flush=True)
    return run(arguments)
command._run = run_and_say_so
sys.exit(command.main(["train", "--size", "tiny", "--steps", "1000000"]))
"""


def read_to(terminal: int, word: bytes | None) -> str:
    """What is written to the terminal until ``word`` comes, or until every process has closed it."""
    shown, deadline = b"", time.monotonic() + 120
    while word is None or word not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"a process still has the terminal open; shown at last: {shown[-500:].decode(errors='replace')}"
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # how Linux says that nobody has the other end open
            assert word is None, shown.decode()
            break
    return shown.decode()


# Seconds after the package is imported: the command's modules come first, then the server of the ranks imports them and
# torch's compiler, which takes a second or more. Or what is shown once the ranks have met.
@pytest.mark.parametrize("moment", [0.0, 0.5, b"tiny model"])
def test_an_interrupt_while_the_ranks_start_is_told_once(moment: float | bytes) -> None:
    terminal, other_end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
    )
    os.close(other_end)
    try:
        read_to(terminal, b"loaded")
        if isinstance(moment, bytes):
            read_to(terminal, moment)
        else:
            time.sleep(moment)
        os.write(terminal, b"\x03")
        shown = read_to(terminal, None)
        assert process.wait(60) == 130, shown
        *_, last = shown.split("^C")  # before it may come the first steps of training
        assert last.replace("\x1b[K", "").split() == ["symm-overlap:", "interrupted"], shown
        assert "Traceback" not in shown
        assert not wait_until_empty(lambda: processes_of(process.pid), seconds=10)
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(process.pid):  # only where the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(terminal)
