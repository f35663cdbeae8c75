"""Tests that programs on two ranks report where they fail or hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.docs.two_ranks import printed_on_two_ranks

FAILS = """
import os, pathlib, time
reached = pathlib.Path(__file__).with_name("reached")
def here():
    if os.environ["RANK"] == "1":
        while not reached.exists():
            time.sleep(0.01)
        raise ValueError("on one rank alone")
    reached.touch()
    time.sleep(100)
here()
"""


def test_a_rank_that_fails_ends_the_other_and_both_say_where(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)exit codes \[None, 1\].* in here.* in here.*ValueError: on one"):
        printed_on_two_ranks(FAILS, tmp_path)
    assert time.monotonic() - began < 50


def test_a_program_that_hangs_says_where(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit codes \[None, None\].* in late.* in late"):
        printed_on_two_ranks("import time\ndef late():\n    time.sleep(100)\nlate()\n", tmp_path, seconds=3)
