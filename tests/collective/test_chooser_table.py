"""The chooser's answers, against those that were last looked at."""

from __future__ import annotations

import difflib

from tests.collective.chooser_table import FILE, text


def test_the_chooser_answers_as_it_did() -> None:
    changes = difflib.unified_diff(FILE.read_text().splitlines(), text().splitlines(), "kept", "now", lineterm="", n=0)
    assert not list(changes), "if the change is meant: python -m tests.collective.chooser_table"
