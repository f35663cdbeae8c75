"""Tests that programs on two ranks report where they fail or hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.docs.two_ranks import printed_on_two_ranks

FAILS = """
import os, time
def here():
    if os.environ["RANK"] == "1":
        raise ValueError("on one rank alone")
    time.sleep(100)
here()
"""


def test_a_rank_that_fails_ends_the_other_and_both_say_where(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)exit codes \[None, 1\].* in here.*ValueError: on one rank alone"):
        printed_on_two_ranks(FAILS, tmp_path)
    assert time.monotonic() - began < 50


def test_a_program_that_hangs_says_where(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit codes \[None, None\].* in late.* in late"):
        printed_on_two_ranks("import time\ndef late():\n    time.sleep(100)\nlate()\n", tmp_path, seconds=3)
