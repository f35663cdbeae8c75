"""Ranks that a command starts inside of pytest, from the server of tests/ranks.py."""

from __future__ import annotations

import pytest

from tests.ranks import forks


@pytest.fixture
def forked_ranks() -> None:
    """Nobody imports torch: the command finds that this process has a server already."""
    forks()
