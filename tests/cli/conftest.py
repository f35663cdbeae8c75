"""A fixture for commands that start ranks inside pytest: the ranks are forked from the server of tests/ranks.py."""

from __future__ import annotations

import pytest

from tests.ranks import forks


@pytest.fixture
def forked_ranks() -> None:
    """Start this process's fork server. The command then uses this server, and no rank imports torch again."""
    forks()
