"""Ranks that can make groups among themselves, which those of the session's pool cannot: a group is made by all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="package")
def four() -> Iterator[Pool]:
    """Four ranks."""
    with Pool(4) as pool:
        yield pool
