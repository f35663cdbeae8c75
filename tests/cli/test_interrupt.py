"""Ctrl-C at a terminal ends the command at any moment of its start: one line, exit code 130, and no process is left."""

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
# The program has its own session with a terminal, so that the terminal sends the interrupt to every process of it.
PROGRAM = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import symm_overlap.cli.__main__ as command
run = command._run
def run_and_say_so(arguments):  # an earlier interrupt would not reach the command
    print("loaded", flush=True)
    return run(arguments)
command._run = run_and_say_so
sys.exit(command.main(["train", "--size", "tiny", "--steps", "1000000"]))
"""


def read_to(terminal: int, word: bytes | None) -> str:
    """Read what is written to the terminal until ``word`` appears, or if it is None, until every process closes it."""
    shown, deadline = b"", time.monotonic() + 120
    while word is None or word not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"a process still has the terminal open; last output: {shown[-500:].decode(errors='replace')}"
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # on Linux: no process has the other end open
            assert word is None, shown.decode()
            break
    return shown.decode()


# The moment of the interrupt is a number of seconds after the import of the package, or a text that is shown once the
# ranks have met. After the package, the command's modules are imported. Then the fork server imports them and torch's
# compiler, which takes a second or more.
@pytest.mark.slow
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
        *_, last = shown.split("^C")  # the first steps of training may be shown before it
        assert last.replace("\x1b[K", "").split() == ["symm-overlap:", "interrupted"], shown
        assert "Traceback" not in shown
        assert not wait_until_empty(lambda: processes_of(process.pid), seconds=10)
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(process.pid):  # some are left only if the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(terminal)
