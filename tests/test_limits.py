"""Tests of the clock with which other tests measure how soon a death is detected."""

import subprocess
import time

from tests.limits import Death


def test_a_death_counts_from_when_the_process_is_gone() -> None:
    process = subprocess.Popen(["sleep", "60"])
    death = Death(process.pid)
    time.sleep(0.3)
    before = time.monotonic()
    process.kill()
    process.wait()
    time.sleep(1)
    seconds = death.seconds_ago()
    assert 0.5 < seconds <= time.monotonic() - before
